// Drafts by prompt lookup: what follows the last few tokens where they stood before. Or by a head
// (draft_head.cuh). A round multiplies the last token and its drafts, and keeps those that the model would have made. One
// block decides for all; between what it reads and what it writes all blocks meet.
#pragma once

namespace twin {

// A round, as the block that decides leaves it in every rank's memory: how many tokens, none at the
// end; the position of the first; the tokens.
constexpr int ROUND_FIRST = facts::ROUND_FIRST, CANDIDATE = facts::CANDIDATE_FLOATS;
constexpr int LONGEST_MATCH = 4, SHORTEST_MATCH = 2;  // tokens that are looked for
// rounds in a row that kept none of their drafts, as far as they are counted: 2 to that power without
// drafts follow
constexpr int MOST_FAILED = 6;

__device__ __forceinline__ int load_word(const float* at) {
  return bits_as<int>(load_shared(at, true));
}
__device__ __forceinline__ void store_word(float* at, int word) {
  store_peer(at, bits_as<float>(word));
}
__device__ __forceinline__ float* round_at(const Block& b, int rank) {
  return b.launch.ranks[rank].prompt + b.plan.round_round;
}

// The token at a place of a pass.
__device__ __forceinline__ int token_of(const Block& b, const Pass& pass, int token) {
  if (verifies(b, pass)) return load_word(round_at(b, b.rank) + ROUND_FIRST + token);
  return b.launch.request.chunks[pass.first + token];
}

// What the next round is; false behind the last one.
__device__ __forceinline__ bool open_round(Block& b, Pass& pass) {
  const float* const at = round_at(b, b.rank);
  pass.tokens = load_word(at), pass.first = load_word(at + 1);
  b.core.forget();
  if (b.core.thread() == 0) b.at.step = pass.first - b.launch.request.read;
  return pass.tokens > 0;
}

// Floats between the logits of neighbouring tokens.
__device__ __forceinline__ int logits_pitch(const Stage& stage) {
  return (stage.rows + facts::LINE_FLOATS - 1) / facts::LINE_FLOATS * facts::LINE_FLOATS;
}

// Where a block leaves the best of its logits of a token.
__device__ __forceinline__ float* best_at(const Block& b, int rank, int token, int block) {
  return b.launch.ranks[rank].prompt + b.plan.round_best +
         (token * b.plan.blocks + block) * CANDIDATE;
}

// The best of the block's rows of the LM head, of each token.
__device__ TWIN_LARGE void put_best(Block& b, const Stage& head, int tokens) {
  const Span own = b.plan.owned_of(head.owned, b.block);
  const int first = b.rank * b.plan.shard_vocab, pitch = logits_pitch(head);
  b.core.barrier();  // all threads' sums are stored
  TWIN_ONCE
  for (int t = 0; t < tokens; ++t) {
    const float* const logits = b.memory.prompt + b.plan.round_logits + long(t) * pitch;
    Candidate mine = {-infinity(), first + own.lo};
    TWIN_ONCE
    TWIN_EACH(i, own.hi - own.lo) {
      const int token = first + own.lo + i;
      const float logit = capped_logit(load_shared(logits + own.lo + i));
      const Candidate other = {token < b.plan.vocab ? logit : -infinity(), token};
      if (wins(other, mine)) mine = other;
    }
    const Candidate best = b.core.best(mine, wins);
    if (b.core.thread() != 0) continue;
    float* const to = best_at(b, b.rank, t, b.block);
    store_shared(to, best.logit), store_word(to + 1, best.index);
  }
}

// Are a request's tokens drawn?
__device__ __forceinline__ bool draws(const Block& b) {
  return b.plan.full && b.launch.request.temperature != 0.0f;
}

// The block's logits of one token of the round as the sampler wants them, and what it says of them,
// where candidates lie otherwise.
__device__ TWIN_LARGE void put_summary(Block& b, const Stage& head, const Pass& pass, int token) {
  const Span own = b.plan.owned_of(head.owned, b.block);
  const int first = b.rank * b.plan.shard_vocab, rows = own.hi - own.lo;
  const float* const from =
      b.memory.prompt + b.plan.round_logits + long(token) * logits_pitch(head) + own.lo;
  b.core.barrier();  // all threads' sums are stored, and the room is free
  float* const logit = head_logits(b);
  TWIN_EACH(i, rows)
    logit[i] = first + own.lo + i < b.plan.vocab ? capped_logit(load_shared(from + i)) : -infinity();
  // which of the two buffers, and which random number
  if (b.core.thread() == 0) b.at.step = pass.first + token - b.launch.request.read;
  b.core.barrier();
  const Pack<SUMMARY> said = summarize(b, logit, rows, first + own.lo);
  if (b.core.thread() != 0) return;
  TWIN_UNROLL
  for (int i = 0; i < SUMMARY; ++i)
    store_peer(b.memory.prompt + b.plan.round_best + b.block * SUMMARY + i, said.at[i]);
}

// The block that decides: all its threads together.
struct Drafts {
  Block& b;
  int most;    // tokens that are drafted at most,
  int pause;   // after so many rounds without
  int failed;  // rounds in a row that kept none of their drafts
  int rounds;  // so far

  __device__ __forceinline__ explicit Drafts(Block& block)
      : b(block), most(block.launch.request.drafts), pause(0), failed(0), rounds(0) {}
  __device__ __forceinline__ bool mine() const { return b.rank == 0 && b.block == 0; }
  // All tokens so far; behind the last one, where a round's words are erased, those that are drafted.
  __device__ __forceinline__ float* history() const {
    return b.launch.ranks[0].prompt + b.plan.round_history;
  }

  // What was drafted behind a token of a round.
  __device__ __forceinline__ int drafted(int first, int token) const {
    return load_word(b.plan.handed_on ? history() + first + token + 1
                                      : round_at(b, 0) + ROUND_FIRST + token + 1);
  }

  // Before the first round: the prompt.
  __device__ TWIN_LARGE void begin() {
    const Request& wanted = b.launch.request;
    TWIN_ONCE
    TWIN_EACH(i, wanted.read + 1) store_word(history() + i, TWIN_GLOBAL(wanted.chunks)[i]);
    b.core.barrier();
    // a head drafts behind tokens that the model has seen
    next(wanted.read, b.core.any(b.core.thread() == 0 && load_host(wanted.abort)),
         !b.plan.draft_vocab);
  }

  // Drafts that the round behind the last token, at `position`, may have.
  __device__ __forceinline__ int room(int position, bool over) {
    const Request& wanted = b.launch.request;
    const int left = wanted.steps - (position - wanted.read);  // tokens that may still be made
    if (pause > 0) --pause;
    return over || pause > 0 || left < 2 || position == 0 ? 0 : least(most, left - 1);
  }

  // For a head that drafts: what it is to do behind a round of which `count` tokens count.
  __device__ TWIN_LARGE void ask(int position, int count, bool over) {
    const int drafts = room(position, over);
    if (b.core.thread() != 0) return;
    float* const to = b.memory.prompt + b.plan.draft_wanted;
    store_word(to, over), store_word(to + 1, position);
    store_word(to + 2, count), store_word(to + 3, drafts);
  }

  // The round behind the last token, which is at `position`.
  __device__ TWIN_LARGE void next(int position, bool over, bool drafting = true) {
    const Request& wanted = b.launch.request;
    const int most = room(position, over);
    const int from = !most || !drafting ? 0 : wanted.accepted > 0.0 ? 1 : found(position);
    const int drafted = from ? most : 0;
    // where a match reaches the end, what follows repeats
    TWIN_ONCE
    TWIN_EACH(i, b.plan.ranks * (drafted + 1)) {
      const int at = i % (drafted + 1);
      const int token =
          load_word(history() + (at == 0 ? position : from + (at - 1) % (position + 1 - from)));
      store_word(round_at(b, i / (drafted + 1)) + ROUND_FIRST + at, token);
      if (b.plan.handed_on && at > 0) store_word(history() + position + at, token);
    }
    TWIN_EACH(rank, b.plan.ranks) {
      float* const to = round_at(b, rank);
      store_word(to, over ? 0 : 1 + drafted), store_word(to + 1, position);
    }
  }

  // Behind the last place where the tokens before `position`, and it, stood before: of the longest
  // match. 0: nowhere.
  __device__ __forceinline__ int found(int position) const {
    constexpr int AT_ONCE = 4;
    int last[LONGEST_MATCH];
    TWIN_UNROLL
    for (int k = 0; k < LONGEST_MATCH; ++k)
      last[k] = load_word(history() + (position > k ? position - k : 0));
    Candidate mine = {0.0f, 0};  // a match's length, the place where it ends, counted backwards
    const int step = b.core.threads();
    TWIN_ONCE
    for (int i = b.core.thread() + 1; i < position; i += AT_ONCE * step) {
      int seen[AT_ONCE], before[AT_ONCE];
      TWIN_UNROLL
      for (int j = 0; j < AT_ONCE; ++j) {
        const int at = i + j * step < position ? i + j * step : i;
        seen[j] = load_word(history() + at), before[j] = load_word(history() + at - 1);
      }
      TWIN_UNROLL
      for (int j = 0; j < AT_ONCE; ++j) {
        const int at = i + j * step;
        if (at >= position || seen[j] != last[0] || before[j] != last[1]) continue;
        int length = SHORTEST_MATCH;
        TWIN_ONCE
        while (length < LONGEST_MATCH && at >= length &&
               load_word(history() + at - length) == last[length])
          ++length;
        const Candidate other = {float(length), -at};
        if (wins(other, mine)) mine = other;
      }
    }
    const Candidate best = b.core.best(mine, wins);
    return best.logit > 0.0f ? 1 - best.index : 0;
  }

  // The tokens of a round that are drawn, one after the other: the next one is drawn where this one
  // was drafted, with the random number of its position. So drafts change no token. What was drawn
  // lies in the rank's memory meanwhile: the sampler has the scratch.
  __device__ TWIN_LARGE bool draw(int token, const Pass& pass) {
    const Request& wanted = b.launch.request;
    Drawing drawing(b);
    Candidate mine = {-infinity(), 0x7FFFFFFF};
    TWIN_ONCE
    TWIN_EACH(i, drawing.count) {
      const float* const at = b.launch.ranks[i / b.plan.blocks].prompt + b.plan.round_best +
                              i % b.plan.blocks * SUMMARY;
      Pack<SUMMARY> said;
      TWIN_UNROLL
      for (int k = 0; k < SUMMARY; ++k) said.at[k] = load_shared(at + k, true);
      const Candidate other = {said.at[0], int(said.at[1])};
      if (wins(other, mine)) mine = other;
      drawing.put(i, said);
    }
    const Candidate best = b.core.best(mine, wins);
    const int made = drawing.token(best, u64(pass.first + token - wanted.read));
    float* const at = drawn() + token;
    const bool more = made >= 0 && !stops(made) && token + 1 < pass.tokens &&
                      drafted(pass.first, token) == made;
    if (b.core.thread() == 0) store_word(at, made);
    TWIN_EACH(rank, b.plan.ranks) store_word(going(rank), more);
    b.core.barrier();
    return more;
  }
  // Behind the summaries: tokens of the round that were drawn; does another one follow?
  __device__ __forceinline__ float* drawn() const {
    return b.launch.ranks[0].prompt + b.plan.round_drawn;
  }
  __device__ __forceinline__ float* going(int rank) const {
    return b.launch.ranks[rank].prompt + b.plan.round_drawn + b.plan.drafts + 1;
  }

  // Of each token of the round the one that the model makes behind it, -1 where none is finite, and
  // the one that was drafted.
  __device__ __forceinline__ int* choose(const Pass& pass) const {
    const int tokens = pass.tokens;
    int* const to = reinterpret_cast<int*>(b.scratch);  // [tokens][2]
    if (draws(b)) {
      TWIN_EACH(t, tokens) {
        to[2 * t] = load_word(drawn() + t);
        to[2 * t + 1] = t + 1 < pass.tokens ? drafted(pass.first, t) : -1;
      }
      b.core.barrier();
      return to;
    }
    constexpr int AT_ONCE = 4;  // whose loads are under way together
    TWIN_ONCE
    for (int t = b.core.warp(); t < tokens; t += b.core.warps()) {
      Candidate mine = {-infinity(), 0x7FFFFFFF};
      const int count = b.plan.ranks * b.plan.blocks, step = b.core.warp_threads();
      TWIN_ONCE
      for (int i = b.core.warp_thread(); i < count; i += AT_ONCE * step) {
        Candidate other[AT_ONCE];
        Patience patience;
        for (;;) {
          bool late = false;
          TWIN_UNROLL
          for (int j = 0; j < AT_ONCE; ++j) {
            const int from = i + j * step < count ? i + j * step : i;
            const float* const at = best_at(b, from / b.plan.blocks, t, from % b.plan.blocks);
            other[j] = {load_shared(at, true), load_word(at + 1)};
          }
          TWIN_UNROLL
          for (int j = 0; j < AT_ONCE; ++j)
            late |= bits_as<u32>(other[j].logit) == SENTINEL || u32(other[j].index) == SENTINEL;
          if (!b.plan.handed_on || !late) break;
          if (!keep_waiting(b, patience, {b.plan.round_stages - 1, -1, 0, t})) break;
        }
        TWIN_UNROLL
        for (int j = 0; j < AT_ONCE; ++j)
          if (wins(other[j], mine)) mine = other[j];
      }
      TWIN_UNROLL
      for (int mask = b.core.warp_threads() / 2; mask; mask /= 2) {
        const Candidate other = {b.core.shuffle_xor(mine.logit, mask),
                                 b.core.shuffle_xor(mine.index, mask)};
        if (wins(other, mine)) mine = other;
      }
      if (b.core.warp_thread() != 0) continue;
      to[2 * t] = finite(mine.logit) ? mine.index : -1;
      to[2 * t + 1] = t + 1 < pass.tokens ? drafted(pass.first, t) : -1;
    }
    b.core.barrier();
    return to;
  }

  // How many of a round's tokens a timed run takes for accepted.
  __device__ __forceinline__ int forced(int tokens) {
    const double each = b.launch.request.accepted;
    const int count = int(each * double(rounds + 1)) - int(each * double(rounds));
    ++rounds;
    return count < 1 ? 1 : least(count, tokens);
  }

  __device__ __forceinline__ bool stops(int token) const {
    const Request& wanted = b.launch.request;
    bool found = false;
    TWIN_ONCE
    for (int i = 0; i < wanted.stop_count; ++i) found |= TWIN_GLOBAL(wanted.stop)[i] == token;
    return found;
  }

  // Hands out the tokens of a round that count, and says what the next one is. False: the
  // generation has failed.
  __device__ TWIN_LARGE bool settle(const Pass& pass) {
    const Request& wanted = b.launch.request;
    const int* const made = choose(pass);
    const int step = pass.first - wanted.read;
    int count = 0, token = -1;
    bool stopped = false;
    do {  // a draft counts where the model makes it, and never behind a stop token
      token = made[2 * count];
      stopped = stops(token);
      ++count;
    } while (!stopped && token >= 0 && count < pass.tokens && made[2 * count - 1] == token);
    if (wanted.accepted > 0.0) count = forced(pass.tokens), stopped = false;
    const bool failed_here = token < 0;
    if (failed_here) --count;
    TWIN_EACH(i, count)
      if (step + i + 1 < wanted.steps) store_word(history() + pass.first + i + 1, made[2 * i]);
    bool over = stopped || step + count >= wanted.steps;
    if (b.core.thread() == 0)
      over |= b.plan.handed_on ? b.core.abort_requested(wanted.abort)
                               : load_host(wanted.abort) != 0;
    over = b.core.any(over);
    if (!failed_here) {  // others wait for it
      if (!(wanted.accepted > 0.0)) learn(pass.tokens - 1, count - 1);
      if (b.plan.draft_vocab) ask(pass.first + count, count, over);
      else next(pass.first + count, over);
    }
    TWIN_EACH(i, count) TWIN_GLOBAL(wanted.tokens)[step + i] = made[2 * i];
    if (b.core.thread() == 0) {  // one time for all of them: threads' clocks are read in any order
      const u64 now = now_ns();
      for (int i = 0; i < count; ++i) TWIN_GLOBAL(wanted.stamps)[step + i] = now;
      TWIN_GLOBAL(wanted.pass_stamps)[pass.number] = now;
    }
    if (b.plan.handed_on && !over && !failed_here) return true;  // the scheduler warp tells the host
    host_fence();
    b.core.barrier();
    if (b.core.thread() == 0) {
      store_host(&b.control->emitted, step + count);
      if (stopped) claim(&b.control->status, int(Status::RUNNING), int(Status::STOP));
      if (failed_here) {
        claim(&b.control->status, int(Status::RUNNING), int(Status::NO_TOKEN));
        leave_all(b.launch);
      }
    }
    return !failed_here;
  }

  // How many tokens the next rounds draft: more while all are kept, fewer behind a draft that was
  // not, none for a while where nothing is.
  __device__ __forceinline__ void learn(int drafted, int kept) {
    if (drafted == 0) return;
    const int limit = b.launch.request.drafts;
    failed = kept ? 0 : least(failed + 1, MOST_FAILED);
    most = kept == drafted ? least(limit, 2 * most) : least(limit, kept + 2);
    pause = failed > 1 ? 1 << failed : 0;
  }
};

}  // namespace twin

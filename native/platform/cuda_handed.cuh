// Rounds whose blocks hand numbers on one by one, as steps do: a word that nobody has written yet
// is a sentinel, and whoever needs it looks until it is there. No block waits for all others.
//
// A layer has five hand-offs, and a sixth where several blocks look at a KV head's cache:
//
//   inputs, squares -> QKV -> heads -> attention -> (parts ->) outputs -> output projection
//   inputs, squares -> GATE_UP -> fed -> down projection -> inputs, squares of the next layer
//
// Who makes rows of the residual hands them on times the next norm's weights, and the sum of their
// squares: a norm's factor is the same for all columns, so it comes behind products. Rows' blocks
// change from layer to layer, so the residual itself is handed on, too.
//
// What was handed on is erased by all blocks' scheduler warps, a share each, when they know that
// all have read it: squares of the next inputs come from every block, behind what it has read. They
// also come behind what it has erased, so who has read them finds it erased (twin/proof/handed.py).
// Inputs have INPUTS places in turn: who looks for some may not have seen those before erased.
#pragma once

namespace twin {

// ---- words --------------------------------------------------------------------------------------

// Sixteen bytes of what other blocks write, where `wanted`; else `to` stays.
__device__ __forceinline__ void load_words_if(bool wanted, const u8* at, u32 (&to)[4]) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, "
      "[%4]; }"
      : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
      : "l"(at), "r"(u32(wanted))
      : "memory");
}
// Is one of the eight halves not there? Each is written by itself.
__device__ __forceinline__ bool half_missing(const u32 (&words)[4]) {
  u32 late = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) late |= (0xFFFEFFFEu - words[i]) & words[i];
  return late & 0x80008000u;
}
__device__ __forceinline__ void store_half(u8* at, u16 bits) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(at), "h"(bits) : "memory");
}
__device__ __forceinline__ void store_word(u8* at, u32 bits) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(bits) : "memory");
}

// Erases `count` words by a warp, sixteen bytes at a time, and reads them back: then they lie where
// all blocks look.
__device__ __forceinline__ void erase(float* at, int count, int thread) {
  TWIN_ONCE
  for (int i = 4 * thread; i < count; i += 4 * 32)
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(at + i), "r"(SENTINEL)
                 : "memory");
  constexpr int AT_ONCE = 8;
  TWIN_ONCE
  for (int i = 4 * thread; i < count; i += 4 * 32 * AT_ONCE) {
    u32 all = 0;
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const float4 v = load_quad(at + (i + 4 * 32 * j < count ? i + 4 * 32 * j : i));
      all |= bits_as<u32>(v.x) | bits_as<u32>(v.y) | bits_as<u32>(v.z) | bits_as<u32>(v.w);
    }
    await_word(all);
  }
}
// A block's share of `count` words, whoever made them.
__device__ __forceinline__ void erase_share(float* at, int count, int block, int thread) {
  const int first = count / 4 * block / Plan::blocks * 4,
            last = count / 4 * (block + 1) / Plan::blocks * 4;
  erase(at + first, last - first, thread);
}

// ---- where things lie ---------------------------------------------------------------------------

// Places of inputs: the residual times a norm's weights, [tokens][hidden] of 16 bits; each block's
// squares of it, [blocks][tokens]; the residual itself, [hidden][tokens]. `_handed` in
// twin/kernel/prompt.py.
constexpr int INPUTS = 4, SQUARES_AT = MOST_FEW * Plan::hidden / 2,
              RESIDUAL_AT = SQUARES_AT + MOST_FEW * Plan::blocks,
              INPUT_FLOATS = RESIDUAL_AT + MOST_FEW * Plan::hidden;
// The last layer's stages stand for those of all.
constexpr int LAST_DOWN = Plan::round_stages - 2, LAST_QKV = LAST_DOWN - 4;

struct HandedAt {
  __device__ static float* place(const RankMemory& memory, u32 turn) {
    return memory.prompt + Plan::round_inputs + turn % INPUTS * u32(INPUT_FLOATS);
  }
  __device__ static u8* inputs(const RankMemory& memory, u32 turn) {
    return reinterpret_cast<u8*>(place(memory, turn));
  }
  __device__ static float* squares(const RankMemory& memory, u32 turn) {
    return place(memory, turn) + SQUARES_AT;
  }
  __device__ static float* residual(const RankMemory& memory, u32 turn) {
    return place(memory, turn) + RESIDUAL_AT;
  }
  __device__ static float* heads(const RankMemory& memory) {
    return memory.prompt + Plan::round_heads;
  }
  __device__ static u8* fed(const RankMemory& memory) {
    return reinterpret_cast<u8*>(memory.prompt + Plan::round_fed);
  }
  __device__ static u8* outputs(const RankMemory& memory) {
    return reinterpret_cast<u8*>(memory.prompt + Plan::round_outputs);
  }
};

constexpr int ROUND_WORDS = (ROUND_FIRST + MOST_FEW + 3) / 4 * 4;

// What the consumers tell the scheduler warp of a stage that has read inputs.
struct HandedNote {
  static constexpr int AT =
      Few::BEGIN + Few::OWN + 4 * (4 * CONSUMER_WARPS) * MOST_FEW;
  int index;
  u32 turn;   // of these inputs
  int parts;  // floats of parts that the block has published in this layer
};

// The scheduler warp: erases what all blocks have read, and in the first stage of a round tells the
// host of the tokens before, and looks whether it wants the end. Behind inputs of GATE_UP: those of
// QKV, what attention was made of and its outputs. Behind those of QKV or of the LM head: those of
// GATE_UP, and what the down projection has read.
__device__ void keep_rounds(const Launch& launch, const RankMemory& memory, int block,
                            Signals& signals, const Progress& progress,
                            volatile HandedNote& note) {
  const Plan& plan = launch.plan;
  const int thread = int(threadIdx.x % 32);
  const u32 go = shared_address(&signals.go), done = shared_address(&signals.done),
            left = shared_address(&signals.left);
  for (u32 stages = 0;; ++stages) {
    while (!barrier_passed(go, stages & 1u))
      if (barrier_seen(left, 0)) return;
    const int index = note.index, parts = note.parts;
    erase_share(HandedAt::place(memory, note.turn - 1), INPUT_FLOATS, block, thread);
    if (plan.stages_at(index).kind == int(StageKind::GATE_UP)) {
      erase_share(HandedAt::heads(memory), MOST_FEW * plan.stages_at(LAST_QKV).rows, block, thread);
      erase_share(memory.prompt + Plan::round_outputs, MOST_FEW * Plan::heads_cols / 2, block,
                  thread);
      constexpr long PARTS = long(Plan::drafts + 1) * GROUP * (HEAD_DIM + facts::PART_ENDS);
      erase(memory.prompt + Plan::round_parts + block * PARTS, parts, thread);
    } else {
      erase_share(memory.prompt + Plan::round_fed, MOST_FEW * Plan::ffn_cols / 2, block, thread);
    }
    if (index == 1) {
      erase_share(memory.prompt + Plan::round_best, Plan::round_round - Plan::round_best, block,
                  thread);
      if (block == 0) {
        erase(memory.prompt + Plan::round_round, ROUND_WORDS, thread);
        if (thread == 0) {
          if (load_host(launch.request.abort)) *const_cast<volatile u16*>(&signals.stop) = 1;
          store_host(&launch.control->emitted, progress.step);
        }
      }
    }
    __syncwarp();
    if (thread == 0) barrier_arrive(done);
  }
}

// What the stages of a block have in common.
struct HandedBlock {
  Block& b;
  Pass& pass;
  u8* shared;  // behind the ring
  u32 turn;    // inputs so far
  int parts;   // floats of parts that the block has published in this layer

  __device__ __forceinline__ HandedBlock(Block& b, Pass& pass)
      : b(b),
        pass(pass),
        shared(reinterpret_cast<u8*>(b.input) - Plan::ring_slots * Plan::slot_bytes + Few::BEGIN),
        turn(0),
        parts(0) {}

  // A thread of products' ends has one token, since threads are a multiple of them.
  __device__ __forceinline__ int token() const { return b.core.thread() % MOST_FEW; }
  __device__ __forceinline__ float* sums() const {
    return reinterpret_cast<float*>(shared) + b.half * Few::HALF_FLOATS;
  }
  // [warps][tokens] of the inputs' squares; of the block's own
  __device__ __forceinline__ float* norms() const {
    return reinterpret_cast<float*>(shared + Few::OWN);
  }
  __device__ __forceinline__ float* squares() const { return norms() + CONSUMER_WARPS * MOST_FEW; }
  __device__ __forceinline__ Candidate* best() const {  // [warps][tokens]
    return reinterpret_cast<Candidate*>(squares() + CONSUMER_WARPS * MOST_FEW);
  }

  // All words of what is handed on, before the first round; all blocks meet behind it.
  __device__ TWIN_LARGE void clear() {
    constexpr int END = Plan::round_outputs + MOST_FEW * Plan::heads * HEAD_DIM / 2;
    TWIN_ONCE
    for (int i = Plan::round_parts + b.block * CONSUMERS + b.core.thread(); i < END;
         i += Plan::blocks * CONSUMERS)
      store_shared(b.memory.prompt + i, bits_as<float>(SENTINEL));
    for (int i = Plan::round_best + b.block * CONSUMERS + b.core.thread(); i < Plan::round_drawn;
         i += Plan::blocks * CONSUMERS)
      store_shared(b.memory.prompt + i, bits_as<float>(SENTINEL));
  }

  // Waits for the next round; false behind the last one.
  __device__ __forceinline__ bool open() {
    const float* const at = round_at(b, b.rank);
    Patience patience;
    for (;;) {
      pass.tokens = load_word(at), pass.first = load_word(at + 1);
      if (u32(pass.tokens) != SENTINEL && u32(pass.first) != SENTINEL) break;
      if (!b.core.agree(keep_waiting(b, patience, {0, -1, 0, 0})) || b.core.gave_up()) break;
    }
    b.core.forget();
    b.core.barrier();
    if (b.core.thread() == 0) b.at.step = pass.first - b.launch.request.read;
    return !b.core.gave_up() && pass.tokens > 0;
  }

  // The inputs are read: what lies before them may go.
  __device__ __forceinline__ void begin(int index) {
    if (b.core.phase > 1) b.core.cleared();
    b.core.phase += 2;
    if (b.core.thread() == 0) {
      volatile HandedNote& note = *reinterpret_cast<volatile HandedNote*>(
          shared - Few::BEGIN + HandedNote::AT);
      note.index = index, note.turn = turn, note.parts = parts;
    }
    __syncwarp();
    if (b.core.warp_thread() == 0) barrier_arrive(b.core.go);
  }
};

}  // namespace twin

#include "cuda_handed_products.cuh"
#include "cuda_handed_heads.cuh"

namespace twin {

struct HandedRounds : HandedHeads {
  using HandedHeads::HandedHeads;

  __device__ __forceinline__ bool run() {
    embed();
    TWIN_ONCE
    for (int index = 1; index < Plan::round_stages; ++index) {
      const Stage& stage = b.plan.stages_at(TWIN_SAME(index));
      b.core.forget();
      TWIN_KEEP(pass.first);
      TWIN_KEEP(pass.tokens);
      bool good = true;
      switch (StageKind(stage.kind)) {
        case StageKind::QKV:
        case StageKind::GATE_UP:
        case StageKind::LM_HEAD: good = from_residual(index, stage); break;
        case StageKind::ATTENTION: good = attend(index, stage); break;
        default: good = to_residual(index, stage);
      }
      if (!good) return false;
    }
    return true;
  }
};

// The rounds of a generation, as run_rounds.
__device__ __forceinline__ void run_handed_rounds(Block& b) {
  const Request& wanted = b.launch.request;
  const Stage& head = b.plan.stages_at(Plan::round_stages - 1);
  Pass pass = {};
  pass.verifies = true;
  if (Plan::prompt_chunk > 1)
    pass.number = (wanted.read - wanted.kept + Plan::prompt_chunk - 1) / Plan::prompt_chunk;
  HandedRounds rounds(b, pass);
  rounds.clear();
  if (!meet(b, Plan::round_stages - 1, pass)) return;
  Drafts drafts(b);
  if (drafts.mine()) drafts.begin();
  for (; rounds.open(); ++pass.number) {
    if (!rounds.run()) return;
    if (draws(b) && !draw_round(b, head, drafts, pass)) return;
    if (drafts.mine() && !drafts.settle(pass)) return;
  }
}

}  // namespace twin

// AMD's kernel on the CPU (waves.h): who takes the next turn, and the launch.
#include "../../native/platform/hip_main.hip"

#undef asm
#undef volatile

#include <pthread.h>

namespace waves {

thread_local Block* block;

// Threads come back on the OS thread that they left, so what is local to it stays where it was.
void Block::pause(Wait wait) {
  Thread& t = threads[running];
  t.wait = wait;
  if (!_setjmp(t.at)) _longjmp(scheduler, 1);
}

int exchange(int value, int from, bool& valid) {
  Thread& t = me();
  t.site = __builtin_return_address(0);
  t.give = value;
  t.from = from;
  block->pause(SWAP);
  valid = me().valid;
  return me().got;
}
void wave_sync() {
  me().site = __builtin_return_address(0);
  block->pause(WAVE_SYNC);
}
void block_sync() { block->pause(BLOCK); }
void nap() { block->pause(NAPS); }

static void body() {
  block->kernel(block->arguments);
  block->pause(LEFT);
}

void Block::begin(int t) {
  Thread& one = threads[t];
  one.begun = true;
  getcontext(&one.first);
  one.first.uc_stack.ss_sp = stacks + STACK * size_t(t);
  one.first.uc_stack.ss_size = STACK;
  one.first.uc_link = nullptr;
  makecontext(&one.first, body, 0);
  setcontext(&one.first);
}

void Block::resume(int t) {
  running = t;
  if (_setjmp(scheduler)) return;
  if (!threads[t].begun) begin(t);
  _longjmp(threads[t].at, 1);
}

// Threads of a wave that none of its others can join any more: those at one place exchange.
bool Block::meet(int wave) {
  Thread* const lanes = threads + wave * LANES;
  const void* site = nullptr;
  int count = 0;
  for (int l = 0; l < LANES; ++l) {
    if (lanes[l].wait == RUNS || lanes[l].wait == NAPS) return false;
    if (lanes[l].wait != SWAP && lanes[l].wait != WAVE_SYNC) continue;
    // of several places any may be first; each is the same code for all who stand there
    if (!site || below(uint32_t(++count)) == 0) site = lanes[l].site;
  }
  if (!site) return false;
  const auto here = [&](int l) {
    return (lanes[l].wait == SWAP || lanes[l].wait == WAVE_SYNC) && lanes[l].site == site;
  };
  for (int l = 0; l < LANES; ++l) {
    if (!here(l) || lanes[l].wait != SWAP) continue;
    const int from = lanes[l].from;
    lanes[l].valid = from >= 0 && here(from);
    lanes[l].got = lanes[l].valid ? lanes[from].give : 0;
  }
  bool freed[LANES];
  for (int l = 0; l < LANES; ++l) freed[l] = here(l);
  for (int l = 0; l < LANES; ++l)
    if (freed[l]) lanes[l].wait = RUNS;
  return true;
}

// False: nobody has anything left to do.
bool Block::turn() {
  bool alive = false, ran = false, at_barrier = true;
  const int first = int(below(WAVES));
  for (int w = 0; w < WAVES; ++w) {
    const int wave = (first + w) % WAVES;
    do {
      for (int l = 0; l < LANES; ++l) {
        Thread& t = threads[wave * LANES + l];
        if (t.wait == RUNS) resume(wave * LANES + l), ran = true;
      }
    } while (meet(wave));
  }
  for (Thread& t : threads) {
    alive |= t.wait != LEFT;
    at_barrier &= t.wait == BLOCK || t.wait == LEFT;
  }
  if (alive && at_barrier) {
    for (Thread& t : threads)
      if (t.wait == BLOCK) t.wait = RUNS;
    return true;
  }
  for (Thread& t : threads)
    if (t.wait == NAPS) t.wait = RUNS;
  if (alive && !ran) sched_yield();
  return alive;
}

void Block::run() {
  block = this;
  while (turn()) {}
}

}  // namespace waves

struct Arguments {
  twin::Launch launch;
  int first_rank;
  int* dies;
  int* reported;
};

static void call(const void* at) {
  const Arguments& given = *static_cast<const Arguments*>(at);
  twin_kernel(given.launch, given.first_rank, given.dies, given.reported);
}

static void* serve(void* given) {
  static_cast<waves::Block*>(given)->run();
  return nullptr;
}

// All blocks of all launches side by side, to their end. `arguments`: of each launch, as the code
// object wants them.
extern "C" int waves_run(const void* const* arguments, int launches, int blocks, int dies,
                         unsigned long seed) {
  std::vector<std::unique_ptr<waves::Block>> all;
  std::vector<pthread_t> running;
  for (int g = 0; g < launches; ++g)
    for (int b = 0; b < blocks; ++b) {
      auto one = std::make_unique<waves::Block>();
      one->number = b;
      one->state = seed + 977u * all.size();
      one->die = int(one->below(unsigned(dies)));
      one->arguments = arguments[g];
      one->kernel = call;
      all.push_back(std::move(one));
    }
  running.resize(all.size());
  for (size_t n = 0; n < all.size(); ++n)
    if (pthread_create(&running[n], nullptr, serve, all[n].get())) abort();
  for (pthread_t thread : running) pthread_join(thread, nullptr);
  return int(sizeof(Arguments));
}

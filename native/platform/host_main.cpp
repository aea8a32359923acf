// The host driver: one pinned OS thread per block of every rank; C entry points for ctypes.
#include <pthread.h>

#include "../monokernel/kernel.cuh"
#include "../monokernel/start.cuh"

namespace twin {
namespace {

struct Worker {
  struct Engine* engine;
  int index;  // rank * blocks + block
  pthread_t thread;
};

struct Engine {
  Launch launch;
  Progress* progress;  // [workers]
  float* memory;       // [workers][residual, input, scratch], guards behind each
  Worker* workers;
  const int* cores;
  int core_count;
  const int* launches;  // per stage, of one step; null when resident
  int count;
  int gate;      // 0: threads are being created; 1: all are there; -1: one could not be, leave
  int waiting;   // threads that have reached the start
  int finished;  // threads that have left
  int epoch;     // kernel launches so far
  int arrived;   // workers done with the present launch
  int stage;     // of the present launch, -1: leave
  Parking parking;
};

// A block's own memory. Behind each part lie words that nobody writes: whoever did has overwritten
// a neighbour's numbers as well.
struct OwnMemory {
  static constexpr int PARTS = 3, GUARD = 32;
  static constexpr u32 UNTOUCHED = 0xFFE5A5A5u;  // a NaN that no arithmetic makes

  long sizes[PARTS];  // residual, input, scratch

  explicit OwnMemory(const Plan& plan)
      : sizes{long(plan.hidden + 31) / 32 * 32, plan.input_floats,
              plan.scratch_floats > plan.prompt_chip_floats ? plan.scratch_floats
                                                            : plan.prompt_chip_floats} {}
  long at(int part) const { return part == 0 ? 0 : at(part - 1) + sizes[part - 1] + GUARD; }
  long floats() const { return at(PARTS); }

  template <class Each>
  void guards(float* own, Each each) const {
    for (int part = 0; part < PARTS; ++part)
      for (int i = 0; i < GUARD; ++i) each(own[at(part) + sizes[part] + i]);
  }
};

Block make_block(Engine& e, int worker) {
  const Plan& plan = e.launch.plan;
  const int rank = worker / plan.blocks, block = worker % plan.blocks;
  const RankMemory& memory = e.launch.ranks[rank];
  const OwnMemory sizes(plan);
  float* own = e.memory + long(worker) * sizes.floats();
  Ring ring = {memory.stream + u64(plan.streams_at(block).page) * PAGE_BYTES, 0,
               u64(plan.window_slots) * u64(plan.slot_bytes)};
  // without cores to pin to, the system places the threads
  const bool crowded = e.count > e.core_count;
  const bool alone = !crowded || (worker < e.core_count && worker + e.core_count >= e.count);
  Core core = {ring, crowded ? &e.parking : nullptr, alone};
  return {core,
          e.launch,
          plan,
          e.launch.control,
          memory,
          rank,
          block,
          e.progress[worker],
          {Core::Hidden::in(own, plan.hidden)},
          own + sizes.at(1),
          own + sizes.at(2),
          0};
}

void pin(const Engine& e, int worker) {
  if (e.core_count == 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(e.cores[worker % e.core_count], &set);  // emulated GPUs share the cores
  // refused in some sandboxes: then the system chooses
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

template <class Ready>
void spin_until(Core& core, Ready ready) {
  for (u32 spins = 0; !ready(); ++spins) core.relax(spins);
}

// One kernel per stage: worker 0 launches, all workers run, worker 0 joins them.
bool launch_stage(Engine& e, Block& b, int stage) {
  __atomic_store_n(&e.arrived, 0, __ATOMIC_RELAXED);
  e.stage = stage;
  __atomic_add_fetch(&e.epoch, 1, __ATOMIC_RELEASE);
  b.core.published();
  const bool done = stage < 0 || run_stage(b, stage);
  spin_until(b.core, [&] { return load_host(&e.arrived) == e.count - 1; });
  return done && !load_host(&e.launch.control->abort);
}

// Launches that an engine without fusion would add: the work is in the stage's last one.
void launch_empty(Engine& e, Block& b) {
  __atomic_store_n(&e.arrived, 0, __ATOMIC_RELAXED);
  e.stage = e.launch.plan.stage_count;
  __atomic_add_fetch(&e.epoch, 1, __ATOMIC_RELEASE);
  b.core.published();
  spin_until(b.core, [&] { return load_host(&e.arrived) == e.count - 1; });
}

// A library's collective is a call between kernels: it runs on the launching thread, for all ranks
// and blocks.
bool call_library(Engine& e, int stage) {
  for (int worker = 0; worker < e.count; ++worker) {
    Block b = make_block(e, worker);
    if (!run_stage(b, stage)) return false;
  }
  return true;
}

void launch_all(Engine& e, Block& b, bool more) {
  const Plan& plan = e.launch.plan;
  while (more) {
    for (int stage = 0; stage < plan.stage_count && more; ++stage) {
      for (int extra = 1; extra < e.launches[stage]; ++extra) launch_empty(e, b);
      const bool library = plan.stages_at(stage).kind == int(StageKind::COLLECTIVE);
      more = library ? call_library(e, stage) : launch_stage(e, b, stage);
    }
    more = end_step(b) && more && load_host(&e.launch.control->status) == int(Status::RUNNING);
  }
  launch_stage(e, b, -1);
}

void serve(Engine& e, Block& b) {
  const int stages = e.launch.plan.stage_count;
  for (int seen = 0;;) {
    spin_until(b.core, [&] { return load_host(&e.epoch) != seen; });
    ++seen;
    const int stage = e.stage;
    if (stage >= 0 && stage < stages) run_stage(b, stage);
    if (stage == stages - 1) end_step(b);
    __atomic_add_fetch(&e.arrived, 1, __ATOMIC_ACQ_REL);
    b.core.published();
    if (stage < 0) return;
  }
}

void* work(void* argument) {
  Worker& me = *static_cast<Worker*>(argument);
  Engine& e = *me.engine;
  pin(e, me.index);
  Block b = make_block(e, me.index);
  spin_until(b.core, [&] { return load_host(&e.gate) != 0; });
  if (load_host(&e.gate) < 0) return nullptr;
  if (me.index == 0) {  // comes last, so that the start is stamped before any block runs
    spin_until(b.core, [&] { return load_host(&e.waiting) >= e.count - 1; });
    store_host(&e.launch.control->started, now_ns());
  }
  __atomic_add_fetch(&e.waiting, 1, __ATOMIC_ACQ_REL);
  b.core.published();
  spin_until(b.core, [&] { return load_host(&e.waiting) >= e.count; });
#if defined(TWIN_FAULTS)
  awake = !at_fault("nap", b.rank);
  if (at_fault("dead", b.rank)) {
    __atomic_add_fetch(&e.finished, 1, __ATOMIC_ACQ_REL);
    return nullptr;
  }
  if (b.rank % b.plan.ranks_per_gpu == 0 && b.block == 0) meet_gpus(e.launch, b.plan, b.rank);
#endif
  if (e.launch.plan.resident) {
    run(b);
  } else {
    // one launch for all passes: their barriers need all blocks
    const bool more = e.launch.request.read == 0 || read_prompt(b);
    me.index == 0 ? launch_all(e, b, more) : serve(e, b);
  }
  __atomic_add_fetch(&e.finished, 1, __ATOMIC_ACQ_REL);
  return nullptr;
}

}  // namespace
}  // namespace twin

using twin::Engine;

extern "C" {

int twin_sizes(int which) {  // of the structs shared with Python
  const int sizes[] = {int(sizeof(twin::RankMemory)), int(sizeof(twin::Request)),
                       int(sizeof(twin::Control)), int(sizeof(twin::Sizes))};
  return sizes[which];
}

// Floats of on-chip memory that each block needs.
long twin_block_floats(const int* image) {
  return twin::OwnMemory(twin::load_plan(image)).floats();
}

// The first block that wrote beyond a part of its memory since the last start, or -1.
int twin_overrun(void* engine) {
  const Engine& e = *static_cast<Engine*>(engine);
  const twin::OwnMemory sizes(e.launch.plan);
  for (int worker = 0; worker < e.count; ++worker) {
    bool whole = true;
    sizes.guards(e.memory + worker * sizes.floats(),
                 [&](float& word) { whole &= twin::bits_as<twin::u32>(word) == sizes.UNTOUCHED; });
    if (!whole) return worker;
  }
  return -1;
}

long twin_progress_bytes() { return long(sizeof(twin::Progress)); }

void* twin_open(const int* image, const twin::RankMemory* ranks, twin::Control* control,
                void* progress, float* memory, const int* cores, int core_count,
                const int* launches) {
  Engine* e = new Engine();
  e->launch.plan = twin::load_plan(image);
  for (int rank = 0; rank < e->launch.plan.ranks; ++rank) e->launch.ranks[rank] = ranks[rank];
  e->launch.control = control;
  e->count = e->launch.plan.ranks * e->launch.plan.blocks;
  e->progress = static_cast<twin::Progress*>(progress);
  e->memory = memory;
  e->cores = cores;
  e->core_count = core_count;
  e->launches = launches;
  e->workers = new twin::Worker[e->count];
  return e;
}

// 0, or the error number of a thread that could not be created; then nothing has run, and a later
// start may succeed.
int twin_start(void* engine, const twin::Request* request) {
  Engine& e = *static_cast<Engine*>(engine);
  e.launch.request = *request;
  e.gate = e.waiting = e.finished = e.epoch = e.arrived = e.stage = 0;
  const twin::OwnMemory sizes(e.launch.plan);
  for (int worker = 0; worker < e.count; ++worker)
    sizes.guards(e.memory + worker * sizes.floats(),
                 [](float& word) { word = twin::bits_as<float>(twin::OwnMemory::UNTOUCHED); });
  int error = 0, created = 0;
  for (; created < e.count && error == 0; ++created) {
    e.workers[created] = {&e, created, {}};
    error = pthread_create(&e.workers[created].thread, nullptr, twin::work, &e.workers[created]);
  }
  twin::store_host(&e.gate, error ? -1 : 1);
  twin::unpark(e.parking);
  for (int worker = 0; error && worker < created - 1; ++worker)
    pthread_join(e.workers[worker].thread, nullptr);
  return error;
}

// Sleeps until more than `known` tokens are there, all threads have left, or the time is over. 1:
// all have left.
int twin_wait(void* engine, int known, int timeout_us) {
  Engine& e = *static_cast<Engine*>(engine);
  const twin::u64 end = twin::now_ns() + twin::u64(timeout_us) * 1000u;
  for (;;) {
    if (twin::load_host(&e.finished) == e.count) return 1;
    if (twin::load_host(&e.launch.control->emitted) > known || twin::now_ns() > end) return 0;
    const timespec nap = {0, 200000};
    if (nanosleep(&nap, nullptr)) return 0;  // a signal: let Python handle it
  }
}

void twin_join(void* engine) {
  Engine& e = *static_cast<Engine*>(engine);
  for (int worker = 0; worker < e.count; ++worker) pthread_join(e.workers[worker].thread, nullptr);
}

void twin_close(void* engine) {
  Engine* e = static_cast<Engine*>(engine);
  delete[] e->workers;
  delete e;
}

}  // extern "C"

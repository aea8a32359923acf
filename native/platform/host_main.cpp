// The host driver: one pinned OS thread per block of every rank; C entry points for ctypes.
#include <pthread.h>

#include "../monokernel/kernel.cuh"

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
  float* memory;       // [workers][residual, input, scratch]
  Worker* workers;
  const int* cores;
  int core_count;
  const int* launches;  // per stage, of one step; null when resident
  int count;
  int waiting;    // threads that have reached the start
  int finished;   // threads that have left
  int epoch;      // kernel launches so far
  int arrived;    // workers done with the present launch
  int stage;      // of the present launch, -1: leave
  Parking parking;
};

long block_floats(const Plan& plan) {
  const long scratch = plan.scratch_floats > plan.prompt_chip_floats ? plan.scratch_floats : plan.prompt_chip_floats;
  return long(plan.hidden + 31) / 32 * 32 + plan.input_floats + scratch;
}

Block make_block(Engine& e, int worker) {
  const Plan& plan = e.launch.plan;
  const int rank = worker / plan.blocks, block = worker % plan.blocks;
  const RankMemory& memory = e.launch.ranks[rank];
  float* own = e.memory + long(worker) * block_floats(plan);
  float* input = own + (plan.hidden + 31) / 32 * 32;
  Ring ring = {memory.stream + u64(plan.streams_at(block).page) * PAGE_BYTES, 0, u64(plan.window_slots) * u64(plan.slot_bytes)};
  const bool crowded = e.count > e.core_count;  // without cores to pin to, the system places the threads
  const bool alone = !crowded || (worker < e.core_count && worker + e.core_count >= e.count);
  Core core = {ring, crowded ? &e.parking : nullptr, alone};
  return {core, e.launch, plan, e.launch.control, memory, rank, block, e.progress[worker],
          {Core::Hidden::in(own, plan.hidden)}, input, input + plan.input_floats, 0};
}

void pin(const Engine& e, int worker) {
  if (e.core_count == 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(e.cores[worker % e.core_count], &set);  // emulated GPUs share the cores
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // refused in some sandboxes: then the system chooses
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

// A library's collective is a call between kernels: it runs on the launching thread, for all ranks and blocks.
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
  if (me.index == 0) {  // comes last, so that the start is stamped before any block runs
    spin_until(b.core, [&] { return load_host(&e.waiting) >= e.count - 1; });
    store_host(&e.launch.control->started, now_ns());
  }
  __atomic_add_fetch(&e.waiting, 1, __ATOMIC_ACQ_REL);
  b.core.published();
  spin_until(b.core, [&] { return load_host(&e.waiting) >= e.count; });
  if (e.launch.plan.resident) {
    run(b);
  } else {
    const bool more = e.launch.request.read == 0 || read_prompt(b);  // one launch for all passes: their barriers need all blocks
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
  const int sizes[] = {int(sizeof(twin::RankMemory)), int(sizeof(twin::Request)), int(sizeof(twin::Control)), int(sizeof(twin::Sizes))};
  return sizes[which];
}

// Floats of on-chip memory that each block needs.
long twin_block_floats(const int* image) { return twin::block_floats(twin::load_plan(image)); }

long twin_progress_bytes() { return long(sizeof(twin::Progress)); }

void* twin_open(const int* image, const twin::RankMemory* ranks, twin::Control* control, void* progress, float* memory, const int* cores,
                 int core_count, const int* launches) {
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

// 0, or the error number of a thread that could not be created; the others are cancelled and joined then.
int twin_start(void* engine, const twin::Request* request) {
  Engine& e = *static_cast<Engine*>(engine);
  e.launch.request = *request;
  e.waiting = e.finished = e.epoch = e.arrived = e.stage = 0;
  for (int worker = 0; worker < e.count; ++worker) {
    e.workers[worker] = {&e, worker, {}};
    const int error = pthread_create(&e.workers[worker].thread, nullptr, twin::work, &e.workers[worker]);
    if (error == 0) continue;
    twin::store_host(&e.launch.control->abort, 1);
    __atomic_add_fetch(&e.waiting, e.count - worker, __ATOMIC_ACQ_REL);  // let the others leave
    e.count = worker;
    for (int other = 0; other < worker; ++other) pthread_join(e.workers[other].thread, nullptr);
    return error;
  }
  return 0;
}

// Sleeps until more than `known` tokens are there, all threads have left, or the time is over. 1: all have left.
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

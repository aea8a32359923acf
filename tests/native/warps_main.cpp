// The host driver with a team of threads for each block.
#include <memory>

#include "../../native/monokernel/kernel.cuh"

namespace twin {

struct Member {
  Block* block;
  int index;
};

inline void* run_member(void* argument);
inline void run_team(Block& b);

}  // namespace twin

#define run run_team
#include "../../native/platform/host_main.cpp"
#undef run

namespace twin {

void* run_member(void* argument) {
  const Member me = *static_cast<Member*>(argument);
  Block b = *me.block;
  b.core.me = me.index;
  b.core.ring.warp = u32(me.index / THREADS);
  run(b);
  return nullptr;
}

#if defined(__SANITIZE_THREAD__)
void run_members(Member* members) {
  pthread_t threads[TEAM];
  for (int i = 0; i < TEAM; ++i)
    if (pthread_create(&threads[i], nullptr, run_member, &members[i])) __builtin_trap();
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
}
#else
thread_local Member* of_team;

void take_part() {
  run_member(&of_team[turns->now]);
  turns->left[turns->now] = true;
  turns->next();
}

void run_members(Member* members) {
  auto own = std::make_unique<Turns>();
  turns = own.get();
  of_team = members;
  for (int i = 0; i < TEAM; ++i) {
    getcontext(&own->first[i]);
    own->first[i].uc_stack = {&own->stacks[Turns::STACK * size_t(i)], 0, Turns::STACK};
    makecontext(&own->first[i], take_part, 0);
  }
  own->begun[0] = true;
  swapcontext(&own->home, &own->first[0]);
  turns = nullptr;
}
#endif

void run_team(Block& b) {
  Team team;
  b.core.team = &team;
  Member members[TEAM];
  for (int i = 0; i < TEAM; ++i) members[i] = {&b, i};
  run_members(members);
}

}  // namespace twin

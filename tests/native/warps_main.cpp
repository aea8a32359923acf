// The host driver with a team of threads for each block.
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
  const Member& me = *static_cast<Member*>(argument);
  Block b = *me.block;
  b.core.me = me.index;
  b.core.ring.warp = u32(me.index / THREADS);
  run(b);
  return nullptr;
}

void run_team(Block& b) {
  Team team;
  b.core.team = &team;
  Member members[TEAM];
  pthread_t threads[TEAM];
  for (int i = 0; i < TEAM; ++i) {
    members[i] = {&b, i};
    if (pthread_create(&threads[i], nullptr, run_member, &members[i])) __builtin_trap();
  }
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
}

}  // namespace twin

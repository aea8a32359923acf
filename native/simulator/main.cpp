// The twin's machine as compiled code: the same events in the same order as SimPy, from the first
// to the end of the last step.
#include "block.h"

namespace twin {
namespace {

// All blocks of a list run, first come first served.
template <class Item>
void wake(State& s, Item& item) {
  Int b = item.head;
  item.head = NONE;
  while (b != NONE) {
    const Int after = s.blocks[b].next;  // running, b may wait for something else
    advance(s, b);
    b = after;
  }
}

// What an event makes seen, if other GPUs fed it.
Int fed_record(const State& s, const Event& event) {
  const Machine& m = *s.machine;
  if (kind_of(event) != SEE) return NONE;
  const Int record = target_of(event) / m.dies;
  return fed_by_others(s, record % m.channels) ? record : NONE;
}

// What a group has pushed may happen before all that is in the queue.
void end_group(State& s) {
  if (s.machine->queued && !begins_group(s, s.queue[0])) return;
  end_pushes(s);
  if (s.machine->queued) begin_group(s, s.queue[0]);
}

// As Machine.run: the end of the last block is an event, and that all have ended another.
void run(State& s) {
  Machine& m = *s.machine;
  if (m.gated)
    for (Int b = 0; b < m.blocks; ++b) find_stretch(s, b);
  if (m.resident)
    for (Int b = 0; b < m.blocks; ++b) pump(s, b);
  ++m.group;
  for (Int b = 0; b < m.blocks; ++b) advance(s, b);
  while (m.error == FINISHED) {
    if (m.mirrors) end_group(s);
    if (m.queued == 0) {
      m.error = DEADLOCK;
      return;
    }
    const Event event = take(s);
    if (m.mirrors) note_event(s, event, fed_record(s, event));
    m.now = event.time;
    const Int target = target_of(event);
    switch (kind_of(event)) {
      case RUN: advance(s, target); break;
      case WAKE_LOADER:
        s.blocks[target].waiting = 0;
        pump(s, target);
        break;
      case SEE: wake(s, s.sights[target]); break;
      case PASS_BARRIER: wake(s, s.barriers[target]); break;
      case PASS_BORDER: wake(s, s.borders[target]); break;
      case END:
        if (++m.ended == m.blocks) schedule(s, m.now, STOP, 0);
        break;
      default:  // STOP
        if (m.mirrors && m.queued && s.queue[0].time == m.now) doubt(s);
        return;
    }
  }
}

}  // namespace
}  // namespace twin

extern "C" void simulate(twin::State* state) { twin::run(*state); }

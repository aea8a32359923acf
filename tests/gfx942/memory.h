// Memory of an MI300X as a kernel may find it at worst. A CU's first-level cache, a die's
// second-level cache and what stands for a GPU's own caches keep what they have until an
// instruction of the right scope drops it or passes by. What a CU writes is seen by itself at once,
// by others when its wave has waited for it, or earlier, in any order.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace gfx {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

constexpr u64 LINE = 128;

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Random {
  u64 state;
  u32 below(u32 n) {  // splitmix64
    u64 z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return u32((z ^ (z >> 31)) >> 33) % n;
  }
};

// Who sees a load or store: threads of the CU, of the GPU, or everybody.
enum Scope { NEAR, AGENT, SYSTEM };

struct Store {
  virtual ~Store() = default;
  virtual void fetch(u64 at, u8* line) = 0;                   // a whole line
  virtual void write(u64 at, const u8* from, u32 count) = 0;  // within a line
};

struct Region {
  u64 at, size;
};

// The computer's own memory: whoever leaves what was lent to the kernel gets so.
struct Memory : Store {
  std::vector<Region> regions;
  void check(u64 at, u32 count) const {
    for (const Region& r : regions)
      if (at >= r.at && at + count <= r.at + r.size) return;
    char said[80];
    snprintf(said, sizeof said, "%u bytes at 0x%llx belong to nobody", count,
             (unsigned long long)at);
    throw Fault(said);
  }
  void fetch(u64 at, u8* line) override {
    for (const Region& r : regions) {  // a line may have strangers' bytes: nobody looks at these
      const u64 lo = at > r.at ? at : r.at,
                hi = at + LINE < r.at + r.size ? at + LINE : r.at + r.size;
      if (lo < hi) memcpy(line + (lo - at), reinterpret_cast<const void*>(lo), hi - lo);
    }
  }
  void write(u64 at, const u8* from, u32 count) override {
    check(at, count);
    memcpy(reinterpret_cast<void*>(at), from, count);
  }
};

struct Line {
  u8 data[LINE];
  bool dirty[LINE];
  bool any_dirty;
};

struct Cache : Store {
  Store& below;
  Random& random;
  u32 forget;  // one in so many looks drops the line first; 0: none
  std::unordered_map<u64, std::unique_ptr<Line>> lines;

  Cache(Store& below, Random& random, u32 forget) : below(below), random(random), forget(forget) {}

  void clean(u64 at, Line& line) {
    if (!line.any_dirty) return;
    for (u32 i = 0; i < LINE; ++i) {
      if (!line.dirty[i]) continue;
      u32 end = i;
      while (end < LINE && line.dirty[end]) line.dirty[end++] = false;
      below.write(at + i, line.data + i, end - i);
      i = end;
    }
    line.any_dirty = false;
  }
  Line& find(u64 at) {
    auto it = lines.find(at);
    if (it != lines.end() && forget && random.below(forget) == 0) {
      clean(at, *it->second);
      lines.erase(it);
      it = lines.end();
    }
    if (it == lines.end()) {
      it = lines.emplace(at, std::make_unique<Line>()).first;
      memset(it->second.get(), 0, sizeof(Line));
      below.fetch(at, it->second->data);
    }
    return *it->second;
  }
  void fetch(u64 at, u8* line) override { memcpy(line, find(at).data, LINE); }
  void write(u64 at, const u8* from, u32 count) override {
    const u64 base = at / LINE * LINE;
    Line& line = find(base);
    memcpy(line.data + (at - base), from, count);
    memset(line.dirty + (at - base), 1, count);
    line.any_dirty = true;
  }
  // What goes by on its way below, and what does not come from here: only what this cache's owners
  // wrote must be there first.
  void pass(u64 at) {
    const auto it = lines.find(at / LINE * LINE);
    if (it != lines.end()) clean(it->first, *it->second);
  }
  void note(u64 at, const u8* from, u32 count) {
    const u64 base = at / LINE * LINE;
    const auto it = lines.find(base);
    if (it == lines.end()) return;
    memcpy(it->second->data + (at - base), from, count);
    memset(it->second->dirty + (at - base), 0, count);
  }
  void write_back() {
    for (auto& [at, line] : lines) clean(at, *line);
  }
  void drop() {
    write_back();
    lines.clear();
  }
};

struct Gpu {
  Cache own;  // of all dies: what other GPUs and the host do not see
  std::vector<std::unique_ptr<Cache>> dies;
  Gpu(Memory& memory, Random& random, int count, bool forgetful)
      : own(memory, random, forgetful ? 64 : 0) {
    for (int i = 0; i < count; ++i)
      dies.push_back(std::make_unique<Cache>(own, random, forgetful ? 64 : 0));
  }
};

struct Write {
  u64 at;
  u32 count;
  u64 order;
  u8 data[16];
};

// A CU's way to memory.
struct Way {
  Memory& memory;
  Gpu& gpu;
  Cache& die;
  Cache first;
  Cache scalar;  // of constants: nothing invalidates it
  // by line: what its waves wrote and others may not see yet
  std::unordered_map<u64, std::vector<Write>> pending;

  Way(Memory& memory, Gpu& gpu, Cache& die, Random& random, bool forgetful)
      : memory(memory),
        gpu(gpu),
        die(die),
        first(die, random, forgetful ? 64 : 0),
        scalar(die, random, 0) {}

  void read(u64 at, u32 count, Scope scope, u64 order, u8* to) {
    memory.check(at, count);
    const u64 base = at / LINE * LINE;
    if (at + count > base + LINE) {
      const u32 here = u32(base + LINE - at);
      read(at, here, scope, order, to);
      read(at + here, count - here, scope, order, to + here);
      return;
    }
    u8 line[LINE];
    if (scope == NEAR) {
      first.fetch(base, line);
    } else {
      die.pass(base);
      if (scope == AGENT) {
        gpu.own.fetch(base, line);
      } else {
        gpu.own.pass(base);
        memory.fetch(base, line);
      }
    }
    memcpy(to, line + (at - base), count);
    const auto mine = pending.find(base);
    if (mine == pending.end()) return;
    for (const Write& w : mine->second) {
      if (w.order > order) continue;
      for (u32 i = 0; i < w.count; ++i)
        if (w.at + i >= at && w.at + i < at + count) to[w.at + i - at] = w.data[i];
    }
  }
  // Of this CU's own waves: from now on they see it.
  void begin_write(const Write& w) {
    memory.check(w.at, w.count);
    pending[w.at / LINE * LINE].push_back(w);
    first.note(w.at, w.data, w.count);
  }
  void end_write(const Write& w, Scope scope) {
    auto& list = pending[w.at / LINE * LINE];
    for (size_t i = 0; i < list.size(); ++i)
      if (list[i].at == w.at && list[i].order == w.order) {
        list.erase(list.begin() + long(i));
        break;
      }
    if (list.empty()) pending.erase(w.at / LINE * LINE);
    if (scope == NEAR) {
      die.write(w.at, w.data, w.count);
      return;
    }
    die.note(w.at, w.data, w.count);
    if (scope == AGENT) {
      gpu.own.write(w.at, w.data, w.count);
    } else {
      gpu.own.pass(w.at);
      gpu.own.note(w.at, w.data, w.count);
      memory.write(w.at, w.data, w.count);
    }
  }
  void write_back(Scope scope) {
    if (scope == NEAR) return;
    die.write_back();
    if (scope == SYSTEM) gpu.own.write_back();
  }
  void invalidate(Scope scope) {
    first.drop();
    if (scope == NEAR) return;
    die.drop();
    if (scope == SYSTEM) gpu.own.drop();
  }
};

}  // namespace gfx

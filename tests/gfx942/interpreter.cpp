// Executes the gfx942 instructions that the kernel uses, as tests/gfx942/interpreter.py has read
// them from a code object. Waves take turns at random; a register whose load nobody waited for is
// not to be touched; memory is memory.h's. Not modelled: time, the cases in which the hardware
// wants s_nop, traps, scaling of denormal quotients.
#include "memory.h"

#include <algorithm>
#include <cmath>
#include <deque>

namespace gfx {

#define NAMES(X)                                                                                 \
  X(buffer_inv) X(buffer_wbl2)                                                                   \
  X(ds_bpermute_b32) X(ds_read2_b32) X(ds_read2_b64) X(ds_read2st64_b32) X(ds_read_b128) X(ds_read_b64) X(ds_read_b32)               \
  X(ds_read_i8) X(ds_read_u16) X(ds_write2_b32) X(ds_write2_b64) X(ds_write_b128) X(ds_write_b16_d16_hi) X(ds_write_b64) X(ds_write_b16) X(ds_write_b8)               \
  X(ds_write_b32)                                                                                \
  X(flat_load_dword) X(flat_load_dwordx2) X(flat_load_dwordx3) X(flat_load_dwordx4)              \
  X(flat_load_ushort) X(flat_store_dword) X(flat_store_dwordx2) X(flat_store_dwordx3)            \
  X(flat_store_dwordx4) X(flat_store_short)                                                      \
  X(global_atomic_add) X(global_atomic_cmpswap) X(global_load_dword) X(global_load_dwordx2)      \
  X(global_load_dwordx3) X(global_load_dwordx4) X(global_load_sbyte) X(global_load_ushort) X(global_store_dword)      \
  X(global_store_dwordx2) X(global_store_dwordx3) X(global_store_dwordx4) X(global_store_short)  \
  X(s_abs_i32) X(s_add_i32) X(s_add_u32) X(s_addc_u32) X(s_and_b32) X(s_and_b64) X(s_and_saveexec_b64)        \
  X(s_andn2_b64) X(s_andn2_saveexec_b64) X(s_ashr_i32) X(s_barrier) X(s_bcnt1_i32_b64)           \
  X(s_addk_i32) X(s_branch) X(s_brev_b32) X(s_cbranch_execnz) X(s_cbranch_execz) X(s_cbranch_scc0) X(s_cbranch_scc1)         \
  X(s_cbranch_vccnz) X(s_cbranch_vccz) X(s_cmp_eq_u32) X(s_cmp_eq_u64) X(s_cmp_ge_i32)           \
  X(s_cmp_ge_u32) X(s_cmp_gt_i32) X(s_cmp_gt_u32) X(s_cmp_le_i32) X(s_cmp_lg_u32) X(s_cmp_lg_u64)                \
  X(s_cmp_lt_i32) X(s_cmp_lt_u32) X(s_cmpk_gt_i32) X(s_cselect_b32) X(s_cselect_b64) X(s_endpgm) X(s_getpc_b64)   \
  X(s_getreg_b32) X(s_load_dword) X(s_load_dwordx2) X(s_load_dwordx4) X(s_load_dwordx8)          \
  X(s_lshl_b32) X(s_lshl_b64) X(s_lshr_b32) X(s_max_i32) X(s_max_u32) X(s_memrealtime) X(s_min_i32)           \
  X(s_mov_b32) X(s_mov_b64) X(s_movk_i32) X(s_mul_hi_i32) X(s_mul_hi_u32) X(s_mul_i32) X(s_mulk_i32) X(s_nop)  \
  X(s_not_b64) X(s_or_b32) X(s_or_b64) X(s_or_saveexec_b64) X(s_orn2_b64) X(s_sleep)             \
  X(s_sub_i32) X(s_sub_u32) X(s_subb_u32) X(s_waitcnt) X(s_xor_b32) X(s_xor_b64)                 \
  X(v_add3_u32) X(v_add_lshl_u32) X(v_add_f32) X(v_add_u16) X(v_add_co_u32) X(v_add_u32) X(v_addc_co_u32) \
  X(v_and_b32) X(v_and_or_b32) X(v_ashrrev_i16) X(v_ashrrev_i32) X(v_bfe_i32) X(v_bfe_u32)       \
  X(v_bfrev_b32) X(v_cmp_class_f32) X(v_cmp_eq_f32) X(v_cmp_eq_u32) X(v_cmp_eq_u64)              \
  X(v_cmp_ge_f32) X(v_cmp_ge_i32) X(v_cmp_ge_u32) X(v_cmp_ge_u64) X(v_cmp_gt_f32)                \
  X(v_cmp_gt_i16) X(v_cmp_gt_i32) X(v_cmp_gt_u32) X(v_cmp_gt_u64) X(v_cmp_le_f32) X(v_cmp_le_i32)                \
  X(v_cmp_le_u32) X(v_cmp_lg_f32) X(v_cmp_lt_f32) X(v_cmp_lt_i16) X(v_cmp_lt_i32) X(v_cmp_lt_u32)                \
  X(v_cmp_lt_u64) X(v_cmp_ne_u16) X(v_cmp_ne_u32) X(v_cmp_ne_u64) X(v_cmp_neq_f32)               \
  X(v_cmp_nge_f32) X(v_cmp_ngt_f32) X(v_cmp_nle_f32) X(v_cmp_nlt_f32) X(v_cmp_o_f32)             \
  X(v_cmp_u_f32) X(v_cndmask_b32) X(v_cvt_f16_f32) X(v_cvt_f32_f16) X(v_cvt_f32_i32)             \
  X(v_cvt_f32_u32) X(v_cvt_i32_f32) X(v_cvt_u32_f32) X(v_div_fixup_f32) X(v_div_fmas_f32)        \
  X(v_div_scale_f32) X(v_dot2c_f32_f16) X(v_dot2_f32_f16) X(v_exp_f32) X(v_fma_f32)              \
  X(v_fma_mix_f32) X(v_fma_mixlo_f16) X(v_fmac_f32) X(v_fmamk_f32) X(v_fmaak_f32) X(v_ldexp_f32) \
  X(v_lshl_add_u32) X(v_lshl_add_u64) X(v_lshl_or_b32) X(v_lshlrev_b16) X(v_lshlrev_b32)         \
  X(v_lshlrev_b64) X(v_lshrrev_b16) X(v_lshrrev_b32) X(v_mad_i64_i32) X(v_mad_u64_u32)           \
  X(v_max_f32) X(v_max_i32) X(v_mbcnt_hi_u32_b32) X(v_mbcnt_lo_u32_b32) X(v_min_f32)             \
  X(v_min_i32) X(v_mov_b32) X(v_mov_b64) X(v_mul_f32) X(v_mul_hi_i32) X(v_mul_hi_u32)            \
  X(v_mul_lo_u32) X(v_mul_u32_u24) X(v_or_b32) X(v_or3_b32) X(v_pack_b32_f16) X(v_perm_b32)      \
  X(v_pk_add_f32) X(v_pk_fma_f32) X(v_pk_mul_f32) X(v_rcp_f32) X(v_rcp_iflag_f32)                \
  X(v_readfirstlane_b32) X(v_readlane_b32) X(v_rndne_f32) X(v_sqrt_f32) X(v_sub_f32)             \
  X(v_sub_u16) X(v_sub_u32) X(v_subrev_u32) X(v_writelane_b32) X(v_xad_u32) X(v_xor_b32)

enum Name : int {
#define X(name) name,
  NAMES(X)
#undef X
};

const char* const SAID[] = {
#define X(name) #name,
    NAMES(X)
#undef X
};

enum Kind : int { VGPR, SGPR, CONSTANT, SHARED_BASE, NONE };
constexpr int NEG = 1, ABS = 2, SEXT = 4;
constexpr int VCC = 106, M0 = 124, EXEC = 126, SGPRS = 128;
constexpr u64 SHARED_APERTURE = 0x10000ull << 32;
constexpr int LANES = 64;

struct Operand {
  int kind, value, count, change, select;  // select: of a sub-dword operand
};

struct Instruction {  // as interpreter.py's Record has it
  int name, at, size, target, operands;
  int offset, offset1, cache;             // cache: sc0 1, sc1 2, nt 4
  int dpp, row_mask, bank_mask, bound;    // dpp: -1 none
  int op_sel, op_sel_hi, neg_lo, neg_hi;  // a bit for each operand
  int vm, lgkm;                           // of s_waitcnt; -1: any
  int destination;                        // sub-dword
  Operand operand[6];
};

struct Piece {
  int lane;
  u64 at;
};

// An access to memory that has been issued.
struct Access {
  enum What { LOAD, WRITE, WRITE_BACK, ADD, SWAP, LOCAL_LOAD, LOCAL_WRITE, SCALAR } what;
  Scope scope;
  u64 order;
  int width = 4;  // bytes of a piece
  std::vector<Piece> pieces;
  std::vector<Write> writes;
  std::vector<u64> lines;      // sorted
  int to = -1, registers = 0;  // vector registers, or scalar ones, that it fills
  bool returns = false, vm = false, lgkm = false, flat = false, done = false;
  u32 data[LANES][4];
};

struct Wave;

struct BlockState {
  std::unique_ptr<Way> way;
  int die;
  std::vector<u8> local;
  std::vector<Wave*> waves;
  int number;
};

struct Wave {
  u32 v[512][LANES];
  u8 awaited[512];  // loads under way to a vector register
  u32 s[SGPRS];
  u8 s_awaited[SGPRS];
  bool scc = false;
  int pc = 0;  // index of the next instruction
  bool ended = false, waiting = false;
  std::deque<std::unique_ptr<Access>> accesses;  // that no s_waitcnt has covered, oldest first
  BlockState* block;
  u64 mask(int n) const { return u64(s[n]) | u64(s[n + 1]) << 32; }
  void set_mask(int n, u64 value) { s[n] = u32(value), s[n + 1] = u32(value >> 32); }
};

float as_float(u32 bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
u32 as_bits(float f) {
  u32 bits;
  memcpy(&bits, &f, 4);
  return bits;
}
float half(u16 bits) {
  _Float16 f;
  memcpy(&f, &bits, 2);
  return float(f);
}
u16 half_bits(float f) {
  const _Float16 h = _Float16(f);
  u16 bits;
  memcpy(&bits, &h, 2);
  return bits;
}

struct Machine {
  const Instruction* program;
  int count, base_at;
  std::unordered_map<int, int> index;  // of an instruction by its address
  u64 base;                            // where address 0 of the file lies
  Memory memory;
  Random random;
  std::vector<std::unique_ptr<Gpu>> gpus;
  std::vector<std::unique_ptr<BlockState>> blocks;
  std::vector<std::unique_ptr<Wave>> waves;
  u64 executed = 0, most, order = 0;
  u32* reached;  // by instruction

  [[noreturn]] void fault(const Wave& w, const Instruction& i, const std::string& what) {
    char where[120];
    snprintf(
        where, sizeof where, "block %d, wave %d, 0x%x %s: ", w.block->number,
        int(std::find(w.block->waves.begin(), w.block->waves.end(), &w) - w.block->waves.begin()),
        i.at, SAID[i.name]);
    throw Fault(where + what);
  }

  // ---- operands ---------------------------------------------------------------------------------

  u32 scalar(const Wave& w, const Operand& o, int word = 0) {
    if (o.kind == SGPR) return w.s[(o.value + word) % SGPRS];
    if (o.kind == SHARED_BASE) return word ? u32(SHARED_APERTURE >> 32) : 0;
    return word ? u32(o.value >> 31) : u32(o.value);
  }
  u64 scalar64(const Wave& w, const Operand& o) {
    return u64(scalar(w, o)) | u64(scalar(w, o, 1)) << 32;
  }
  u32 raw(const Wave& w, const Operand& o, int lane, int word = 0) {
    if (o.kind == VGPR) return w.v[o.value + word][lane];
    return scalar(w, o, word);
  }
  u64 raw64(const Wave& w, const Operand& o, int lane) {
    return u64(raw(w, o, lane)) | u64(raw(w, o, lane, 1)) << 32;
  }
  static u32 selected(u32 bits, int select, bool sign) {
    if (select == 6) return bits;
    const int wide = select < 4 ? 8 : 16, at = select < 4 ? 8 * select : 16 * (select - 4);
    const u32 part = bits >> at & ((1u << wide) - 1);
    return sign && part >> (wide - 1) ? part | ~((1u << wide) - 1) : part;
  }
  u32 U(const Wave& w, const Instruction& i, int n, int lane) {
    return selected(raw(w, i.operand[n], lane), i.operand[n].select, i.operand[n].change & SEXT);
  }
  static float changed(float f, const Operand& o) {
    if (o.change & ABS) f = std::fabs(f);
    return o.change & NEG ? -f : f;
  }
  float F(const Wave& w, const Instruction& i, int n, int lane) {
    return changed(as_float(U(w, i, n, lane)), i.operand[n]);
  }
  void write_scalar(Wave& w, const Operand& o, u32 value) { w.s[o.value] = value; }

  static bool loads_in_order(const Instruction& i) {
    return i.name == global_load_dword || i.name == global_load_dwordx2 ||
           i.name == global_load_dwordx3 || i.name == global_load_dwordx4 ||
           i.name == global_load_ushort || i.name == global_load_sbyte;
  }
  // Loads from global memory fill registers in order: of two to one register the later one wins.
  static bool ordered(const Access& a) { return a.what == Access::LOAD && !a.flat; }
  static bool same_registers(const Access& a, const Access& b) {
    return a.to >= 0 && b.to >= 0 && a.to < b.to + b.registers && b.to < a.to + a.registers;
  }
  static bool filled_in_order(const Wave& w, int r) {
    for (const auto& a : w.accesses)
      if (a->what != Access::SCALAR && a->to <= r && r < a->to + a->registers && !ordered(*a))
        return false;
    return true;
  }

  void check_ready(const Wave& w, const Instruction& i) {
    for (int n = 0; n < i.operands; ++n) {
      const Operand& o = i.operand[n];
      for (int k = 0; k < o.count; ++k) {
        if (n == 0 && loads_in_order(i) && filled_in_order(w, o.value + k)) continue;
        if (o.kind == VGPR && w.awaited[o.value + k])
          fault(w, i, "v" + std::to_string(o.value + k) + " was loaded and not waited for");
        if (o.kind == SGPR && w.s_awaited[o.value + k])
          fault(w, i, "s" + std::to_string(o.value + k) + " was loaded and not waited for");
      }
    }
  }

  // ---- memory -----------------------------------------------------------------------------------

  void perform(Wave& w, Access& a) {
    if (a.done) return;
    a.done = true;
    Way& way = *w.block->way;
    switch (a.what) {
      case Access::LOAD:
        for (const Piece& p : a.pieces)
          way.read(p.at, u32(a.width), a.scope, a.order, reinterpret_cast<u8*>(a.data[p.lane]));
        break;
      case Access::WRITE:
        for (const Write& one : a.writes) way.end_write(one, a.scope);
        break;
      case Access::WRITE_BACK: way.write_back(a.scope); break;
      case Access::ADD:
      case Access::SWAP:
        for (size_t n = 0; n < a.pieces.size(); ++n) {
          u32 was;
          const Piece& p = a.pieces[n];
          way.read(p.at, 4, a.scope, a.order, reinterpret_cast<u8*>(&was));
          const u32* in = a.data[p.lane];
          const u32 next = a.what == Access::ADD ? was + in[0] : was == in[1] ? in[0] : was;
          Write one{p.at, 4, ++order, {}};
          memcpy(one.data, &next, 4);
          way.begin_write(one);
          way.end_write(one, a.scope);
          a.data[p.lane][0] = was;
        }
        break;
      case Access::LOCAL_LOAD:
        for (const Piece& p : a.pieces)
          memcpy(reinterpret_cast<u8*>(a.data[p.lane]) + (p.at >> 32),
                 w.block->local.data() + u32(p.at), size_t(a.width));
        break;
      case Access::LOCAL_WRITE:
        for (const Write& one : a.writes)
          memcpy(w.block->local.data() + one.at, one.data, one.count);
        break;
      case Access::SCALAR: break;
    }
    if (a.to < 0 || a.what == Access::SCALAR) return;
    for (const Piece& p : a.pieces)
      for (int r = 0; r < a.registers; ++r) {
        u32 word = a.data[p.lane][r];
        if (a.width == 2) word &= 0xFFFF;
        if (a.width == 1) word = u32(int(static_cast<signed char>(word)));
        w.v[a.to + r][p.lane] = word;
      }
  }

  static bool meet(const Access& a, const Access& b) {
    size_t i = 0, j = 0;
    while (i < a.lines.size() && j < b.lines.size()) {
      if (a.lines[i] == b.lines[j]) return true;
      a.lines[i] < b.lines[j] ? ++i : ++j;
    }
    return false;
  }
  static bool local(const Access& a) {
    return a.what == Access::LOCAL_LOAD || a.what == Access::LOCAL_WRITE;
  }

  // Which bytes of local memory.
  template <class Each>
  static void local_bytes(const Access& a, Each each) {
    for (const Piece& p : a.pieces) each(u32(p.at), u32(p.at) + u32(a.width));
    for (const Write& one : a.writes) each(u32(one.at), u32(one.at) + one.count);
  }
  static bool overlap(const Access& a, const Access& b) {
    bool found = false;
    local_bytes(a, [&](u32 lo, u32 hi) {
      local_bytes(b, [&](u32 other_lo, u32 other_hi) { found |= lo < other_hi && other_lo < hi; });
    });
    return found;
  }
  // Another wave may not touch bytes of local memory that a wave writes, nor write what it reads,
  // before that wave has waited: whoever comes first, it is chance. Old and new value are often the
  // same, so nobody would notice by what is computed.
  void check_races(const Wave& w, const Access& a) {
    if (!local(a)) return;
    for (const Wave* other : w.block->waves) {
      if (other == &w) continue;
      for (const auto& b : other->accesses) {
        if (!local(*b) || (a.writes.empty() && b->writes.empty()) || !overlap(a, *b)) continue;
        fault(w, program[w.pc - 1],
              "local memory that another wave has not waited for, up to 0x" +
                  hex(program[other->pc].at));
      }
    }
  }
  static std::string hex(int at) {
    char said[20];
    snprintf(said, sizeof said, "%x", unsigned(at));
    return said;
  }

  // The n-th access, behind those before it that must come first.
  void perform_in_order(Wave& w, size_t n) {
    Access& a = *w.accesses[n];
    if (a.done) return;
    for (size_t k = 0; k < n; ++k) {
      Access& b = *w.accesses[k];
      if (b.done) continue;
      const bool back =
          a.what == Access::WRITE_BACK && (b.what == Access::WRITE || b.what == Access::WRITE_BACK);
      const bool fills = ordered(a) && ordered(b) && same_registers(a, b);
      if (back || fills || (local(a) && local(b)) || meet(a, b)) perform_in_order(w, k);
    }
    perform(w, a);
  }

  Access& issue(Wave& w, std::unique_ptr<Access> made) {
    Access& a = *made;
    check_races(w, a);
    for (const Piece& p : a.pieces)
      if (!local(a))
        a.lines.push_back(p.at / LINE), a.lines.push_back((p.at + u64(a.width) - 1) / LINE);
    for (const Write& one : a.writes)
      if (!local(a)) a.lines.push_back(one.at / LINE);
    std::sort(a.lines.begin(), a.lines.end());
    a.lines.erase(std::unique(a.lines.begin(), a.lines.end()), a.lines.end());
    if (a.what == Access::WRITE)
      for (size_t k = 0; k < w.accesses.size(); ++k)
        if (!w.accesses[k]->done && meet(a, *w.accesses[k])) perform_in_order(w, k);
    if (a.to >= 0)
      for (int r = 0; r < a.registers; ++r) {
        if (a.what == Access::SCALAR) {
          ++w.s_awaited[a.to + r];
        } else {
          ++w.awaited[a.to + r];
          for (const Piece& p : a.pieces) w.v[a.to + r][p.lane] = 0xDEADBEEF;
        }
      }
    if (a.what == Access::WRITE)
      for (const Write& one : a.writes) w.block->way->begin_write(one);
    w.accesses.push_back(std::move(made));
    return *w.accesses.back();
  }

  void await(Wave& w, int vm, int lgkm) {
    for (int which = 0; which < 2; ++which) {
      const int left = which ? lgkm : vm;
      if (left < 0) continue;
      int under_way = 0;
      bool unordered = false;
      for (const auto& a : w.accesses) {
        const bool counts = which ? a->lgkm : a->vm;
        under_way += counts;
        unordered |= counts && (a->flat || a->what == Access::SCALAR);
      }
      if (left > 0 && unordered) continue;  // any of them may be the last
      for (size_t n = 0; n < w.accesses.size() && under_way > left; ++n) {
        Access& a = *w.accesses[n];
        if (!(which ? a.lgkm : a.vm)) continue;
        perform_in_order(w, n);
        (which ? a.lgkm : a.vm) = false;
        --under_way;
      }
    }
    for (size_t n = 0; n < w.accesses.size();) {
      Access& a = *w.accesses[n];
      if (a.vm || a.lgkm) {
        ++n;
        continue;
      }
      if (a.to >= 0)
        for (int r = 0; r < a.registers; ++r)
          --(a.what == Access::SCALAR ? w.s_awaited : w.awaited)[a.to + r];
      w.accesses.erase(w.accesses.begin() + long(n));
    }
  }

  u32 local_at(Wave& w, const Instruction& i, u64 at, int width) {
    if (at + u64(width) > w.block->local.size())
      fault(w, i, "local address " + std::to_string(at) + " lies behind the block's memory");
    return u32(at);
  }

  void memory_access(Wave& w, const Instruction& i, bool flat, bool store, int width) {
    auto made = std::make_unique<Access>();
    Access& a = *made;
    a.what = store ? Access::WRITE : Access::LOAD;
    a.scope = i.cache & 2 ? (i.cache & 1 ? SYSTEM : AGENT) : NEAR;
    a.order = ++order;
    a.width = width;
    a.vm = true;
    a.flat = a.lgkm = flat;
    const Operand& address = i.operand[store ? 0 : 1];
    const Operand* base = !flat && i.operand[2].kind == SGPR ? &i.operand[2] : nullptr;
    const u64 exec = w.mask(EXEC);
    int near = 0, far = 0;
    for (int l = 0; l < LANES; ++l) {
      if (!(exec >> l & 1)) continue;
      const u64 at = (base ? scalar64(w, *base) + raw(w, address, l) : raw64(w, address, l)) +
                     u64(long(i.offset));
      const bool shared = flat && at >> 32 == SHARED_APERTURE >> 32;
      ++(shared ? near : far);
      if (!shared) memory.check(at, u32(width));
      const u64 where = shared ? local_at(w, i, u32(at), width) : at;
      if (!store) {
        a.pieces.push_back({l, where});
        continue;
      }
      u32 words[4] = {};
      for (int r = 0; r < (width + 3) / 4; ++r) words[r] = raw(w, i.operand[1], l, r);
      for (int done = 0; done < width;) {
        const int here =
            shared ? width
                   : int(std::min<u64>(u64(width - done), LINE - (where + u64(done)) % LINE));
        Write one{where + u64(done), u32(here), a.order, {}};
        memcpy(one.data, reinterpret_cast<u8*>(words) + done, size_t(here));
        a.writes.push_back(one);
        done += here;
      }
    }
    if (near && far) fault(w, i, "lanes address local and global memory at once");
    if (near) a.what = store ? Access::LOCAL_WRITE : Access::LOCAL_LOAD;
    if (!store) a.to = i.operand[0].value, a.registers = (width + 3) / 4;
    issue(w, std::move(made));
  }

  void atomic(Wave& w, const Instruction& i) {
    auto made = std::make_unique<Access>();
    Access& a = *made;
    a.what = i.name == global_atomic_add ? Access::ADD : Access::SWAP;
    a.scope = i.cache & 2 ? SYSTEM : AGENT;
    a.order = ++order;
    a.vm = true;
    const int first = i.cache & 1 ? 1 : 0;  // sc0: the old value comes back
    const Operand *address = &i.operand[first], *data = &i.operand[first + 1],
                  *base = &i.operand[first + 2];
    const u64 exec = w.mask(EXEC);
    for (int l = 0; l < LANES; ++l) {
      if (!(exec >> l & 1)) continue;
      const u64 at =
          (base->kind == SGPR ? scalar64(w, *base) + raw(w, *address, l) : raw64(w, *address, l)) +
          u64(long(i.offset));
      memory.check(at, 4);
      a.pieces.push_back({l, at});
      a.data[l][0] = raw(w, *data, l);
      if (a.what == Access::SWAP) a.data[l][1] = raw(w, *data, l, 1);
    }
    if (first) a.to = i.operand[0].value, a.registers = 1;
    issue(w, std::move(made));
  }

  // `shift`: of the word whose lower part is stored
  void local_access(Wave& w, const Instruction& i, bool store, int width, bool two,
                    int shift = 0, int stride = 1) {
    auto made = std::make_unique<Access>();
    Access& a = *made;
    a.what = store ? Access::LOCAL_WRITE : Access::LOCAL_LOAD;
    a.lgkm = true;
    a.width = width;
    a.scope = NEAR;
    a.order = ++order;
    const u64 exec = w.mask(EXEC);
    for (int l = 0; l < LANES; ++l) {
      if (!(exec >> l & 1)) continue;
      const u64 at = raw(w, i.operand[store ? 0 : 1], l);
      for (int k = 0; k < (two ? 2 : 1); ++k) {
        const u32 where =
            local_at(w, i, at + u64(two ? (k ? i.offset1 : i.offset) * width * stride : i.offset), width);
        if (!store) {
          a.pieces.push_back({l, u64(where) | u64(k * width) << 32});
          continue;
        }
        Write one{where, u32(width), a.order, {}};
        for (int r = 0; r < (width + 3) / 4; ++r) {
          const u32 word = raw(w, i.operand[1 + k], l, r) >> shift;
          memcpy(one.data + 4 * r, &word, size_t(std::min(4, width - 4 * r)));
        }
        a.writes.push_back(one);
      }
    }
    if (!store) a.to = i.operand[0].value, a.registers = (two ? 2 : 1) * ((width + 3) / 4);
    issue(w, std::move(made));
  }

  void scalar_load(Wave& w, const Instruction& i, int words) {
    auto made = std::make_unique<Access>();
    Access& a = *made;
    a.what = Access::SCALAR;
    a.lgkm = true;
    a.scope = NEAR;
    a.to = i.operand[0].value;
    a.registers = words;
    if (i.name == s_memrealtime) {
      w.set_mask(a.to, executed / 8);
    } else {
      const u64 at = scalar64(w, i.operand[1]) + scalar(w, i.operand[2]);
      for (int r = 0; r < words; ++r) {
        const u64 one = at + u64(4 * r), line = one / LINE * LINE;
        memory.check(one, 4);
        u8 bytes[LINE];
        w.block->way->scalar.fetch(line, bytes);
        memcpy(&w.s[a.to + r], bytes + (one - line), 4);
      }
    }
    issue(w, std::move(made));
  }

  // ---- instructions -----------------------------------------------------------------------------

  template <class Each>
  void lanes(Wave& w, const Instruction& i, Each each) {
    const u64 exec = w.mask(EXEC);
    u32* const to = w.v[i.operand[0].value];
    if (i.dpp >= 0) {
      const Operand& from = i.operand[1];
      u32 seen[LANES];
      u64 valid = 0;
      memcpy(seen, w.v[from.value], sizeof seen);
      u32 moved[LANES] = {};
      for (int l = 0; l < LANES; ++l) {
        const int at = dpp_source(w, i, l);
        if (at >= 0 && exec >> at & 1) {
          moved[l] = seen[at];
          valid |= 1ull << l;
        } else if (i.bound) {
          valid |= 1ull << l;
        }
      }
      u32 made[LANES];
      memcpy(w.v[511], moved, sizeof moved);  // beyond the registers that a wave has
      Instruction plain = i;
      plain.operand[1].value = 511;
      for (int l = 0; l < LANES; ++l) made[l] = each(plain, l);
      for (int l = 0; l < LANES; ++l)
        if (exec >> l & 1 && valid >> l & 1 && i.row_mask >> (l / 16) & 1 &&
            i.bank_mask >> (l % 16 / 4) & 1)
          to[l] = made[l];
      return;
    }
    if (i.destination != 6) { fault(w, i, "a destination of less than a word"); }
    for (int l = 0; l < LANES; ++l)
      if (exec >> l & 1) to[l] = each(i, l);
  }
  int dpp_source(Wave& w, const Instruction& i, int l) {
    const int row = l / 16 * 16;
    if (i.dpp < 0x100) return l / 4 * 4 + (i.dpp >> 2 * (l % 4) & 3);
    switch (i.dpp) {
      case 0x140: return row + 15 - l % 16;
      case 0x141: return l / 8 * 8 + 7 - l % 8;
      case 0x142: return row - 1;
      case 0x143: return l < 32 ? -1 : 31;
    }
    fault(w, i, "an unknown move between lanes");
  }
  template <class Each>
  void lanes64(Wave& w, const Instruction& i, Each each) {
    const u64 exec = w.mask(EXEC);
    const int to = i.operand[0].value;
    for (int l = 0; l < LANES; ++l) {
      if (!(exec >> l & 1)) continue;
      const u64 value = each(l);
      w.v[to][l] = u32(value), w.v[to + 1][l] = u32(value >> 32);
    }
  }
  template <class Each>
  void compare(Wave& w, const Instruction& i, Each each) {
    const u64 exec = w.mask(EXEC);
    u64 found = 0;
    for (int l = 0; l < LANES; ++l)
      if (exec >> l & 1 && each(l)) found |= 1ull << l;
    w.set_mask(i.operand[0].value, found);
  }
  float packed(const Wave& w, const Instruction& i, int n, int lane, bool high) {
    const Operand& o = i.operand[n];
    const int bit = 1 << (n - 1), word = (high ? i.op_sel_hi : i.op_sel) & bit ? 1 : 0;
    const float f = as_float(o.kind == CONSTANT ? u32(o.value) : raw(w, o, lane, word));
    return (high ? i.neg_hi : i.neg_lo) & bit ? -f : f;
  }
  float mixed(const Wave& w, const Instruction& i, int n, int lane) {
    const int bit = 1 << (n - 1);
    const u32 bits = raw(w, i.operand[n], lane);
    return changed(
        i.op_sel_hi & bit ? half(u16(i.op_sel & bit ? bits >> 16 : bits)) : as_float(bits),
        i.operand[n]);
  }
  static u32 reversed(u32 in) {
    u32 out = 0;
    for (int b = 0; b < 32; ++b) out |= (in >> b & 1) << (31 - b);
    return out;
  }
  static u32 to_int(float f, double lo, double hi) {
    if (f != f) return 0;
    const double d = std::trunc(double(f));
    return u32(int64_t(d < lo ? lo : d > hi ? hi : d));
  }

  // False: the wave has something to wait for.
  bool step(Wave& w);
  void run();
};

bool Machine::step(Wave& w) {
  const Instruction& i = program[w.pc++];
  ++executed;
  ++reached[&i - program];
  if (i.name != s_waitcnt) check_ready(w, i);
  const Operand* o = i.operand;
#define LANE(...)                                       \
  lanes(w, i, [&](const Instruction& i, int l) -> u32 { \
    (void)i, (void)l;                                   \
    return __VA_ARGS__;                                 \
  })
#define LANE_F(...) LANE(as_bits(__VA_ARGS__))
#define COMPARE(...) compare(w, i, [&](int l) { return __VA_ARGS__; })
#define UU(n) U(w, i, n, l)
#define II(n) int(U(w, i, n, l))
#define FF(n) F(w, i, n, l)
#define S(n) scalar(w, o[n])
#define S64(n) scalar64(w, o[n])
  auto set = [&](u32 value) { write_scalar(w, o[0], value); };
  auto set_scc = [&](u32 value) { write_scalar(w, o[0], value), w.scc = value != 0; };
  auto set64 = [&](u64 value) { w.set_mask(o[0].value, value); };
  auto set64_scc = [&](u64 value) { set64(value), w.scc = value != 0; };
  auto jump = [&](bool taken) {
    if (taken) w.pc = index.at(i.target);
  };
  auto save = [&](u64 next) {
    set64(w.mask(EXEC));
    w.set_mask(EXEC, next);
    w.scc = next != 0;
  };
  switch (Name(i.name)) {
    // scalar
    case s_mov_b32: set(S(1)); break;
    case s_mov_b64: set64(S64(1)); break;
    case s_movk_i32: set(u32(int(int16_t(o[1].value)))); break;
    case s_add_i32: {
      const int64_t sum = int64_t(int(S(1))) + int(S(2));
      set(u32(sum)), w.scc = sum != int(sum);
      break;
    }
    case s_sub_i32: {
      const int64_t sum = int64_t(int(S(1))) - int(S(2));
      set(u32(sum)), w.scc = sum != int(sum);
      break;
    }
    case s_add_u32: {
      const u64 sum = u64(S(1)) + S(2);
      set(u32(sum)), w.scc = sum >> 32;
      break;
    }
    case s_addc_u32: {
      const u64 sum = u64(S(1)) + S(2) + w.scc;
      set(u32(sum)), w.scc = sum >> 32;
      break;
    }
    case s_sub_u32: {
      const u32 a = S(1), b = S(2);
      set(a - b), w.scc = b > a;
      break;
    }
    case s_subb_u32: {
      const u64 a = S(1), b = u64(S(2)) + w.scc;
      set(u32(a - b)), w.scc = b > a;
      break;
    }
    case s_mul_i32: set(S(1) * S(2)); break;
    case s_abs_i32: set_scc(int(S(1)) < 0 ? 0u - S(1) : S(1)); break;
    case s_brev_b32: set(reversed(S(1))); break;
    case s_addk_i32: {  // the register is what it was, too
      const int64_t sum = int64_t(int(S(0))) + int16_t(o[1].value);
      set(u32(sum)), w.scc = sum != int(sum);
      break;
    }
    case s_mulk_i32: set(S(0) * u32(int(int16_t(o[1].value)))); break;
    case s_mul_hi_i32: set(u32((int64_t(int(S(1))) * int(S(2))) >> 32)); break;
    case s_mul_hi_u32: set(u32((u64(S(1)) * S(2)) >> 32)); break;
    case s_min_i32: {
      const int a = int(S(1)), b = int(S(2));
      set(u32(a < b ? a : b)), w.scc = a < b;
      break;
    }
    case s_max_i32: {
      const int a = int(S(1)), b = int(S(2));
      set(u32(a > b ? a : b)), w.scc = a > b;
      break;
    }
    case s_max_u32: {
      const u32 a = S(1), b = S(2);
      set(a > b ? a : b), w.scc = a > b;
      break;
    }
    case s_and_b32: set_scc(S(1) & S(2)); break;
    case s_or_b32: set_scc(S(1) | S(2)); break;
    case s_xor_b32: set_scc(S(1) ^ S(2)); break;
    case s_and_b64: set64_scc(S64(1) & S64(2)); break;
    case s_or_b64: set64_scc(S64(1) | S64(2)); break;
    case s_xor_b64: set64_scc(S64(1) ^ S64(2)); break;
    case s_andn2_b64: set64_scc(S64(1) & ~S64(2)); break;
    case s_orn2_b64: set64_scc(S64(1) | ~S64(2)); break;
    case s_bcnt1_i32_b64: set_scc(u32(__builtin_popcountll(S64(1)))); break;
    case s_not_b64: set64_scc(~S64(1)); break;
    case s_lshl_b32: set_scc(S(1) << (S(2) & 31)); break;
    case s_lshr_b32: set_scc(S(1) >> (S(2) & 31)); break;
    case s_ashr_i32: set_scc(u32(int(S(1)) >> (S(2) & 31))); break;
    case s_lshl_b64: set64_scc(S64(1) << (S(2) & 63)); break;
    case s_and_saveexec_b64: save(S64(1) & w.mask(EXEC)); break;
    case s_or_saveexec_b64: save(S64(1) | w.mask(EXEC)); break;
    case s_andn2_saveexec_b64: save(S64(1) & ~w.mask(EXEC)); break;
    case s_cselect_b32: set(w.scc ? S(1) : S(2)); break;
    case s_cselect_b64: set64(w.scc ? S64(1) : S64(2)); break;
    case s_cmp_eq_u32: w.scc = S(0) == S(1); break;
    case s_cmp_lg_u32: w.scc = S(0) != S(1); break;
    case s_cmp_eq_u64: w.scc = S64(0) == S64(1); break;
    case s_cmp_lg_u64: w.scc = S64(0) != S64(1); break;
    case s_cmp_ge_i32: w.scc = int(S(0)) >= int(S(1)); break;
    case s_cmp_gt_i32: w.scc = int(S(0)) > int(S(1)); break;
    case s_cmp_le_i32: w.scc = int(S(0)) <= int(S(1)); break;
    case s_cmp_lt_i32: w.scc = int(S(0)) < int(S(1)); break;
    case s_cmp_ge_u32: w.scc = S(0) >= S(1); break;
    case s_cmpk_gt_i32: w.scc = int(S(0)) > int(int16_t(o[1].value)); break;
    case s_cmp_gt_u32: w.scc = S(0) > S(1); break;
    case s_cmp_lt_u32: w.scc = S(0) < S(1); break;
    case s_branch: jump(true); break;
    case s_cbranch_execz: jump(w.mask(EXEC) == 0); break;
    case s_cbranch_execnz: jump(w.mask(EXEC) != 0); break;
    case s_cbranch_vccz: jump(w.mask(VCC) == 0); break;
    case s_cbranch_vccnz: jump(w.mask(VCC) != 0); break;
    case s_cbranch_scc0: jump(!w.scc); break;
    case s_cbranch_scc1: jump(w.scc); break;
    case s_getpc_b64: set64(base + u64(i.at + i.size)); break;
    case s_getreg_b32: set(u32(w.block->die)); break;
    case s_nop: break;
    case s_sleep: return false;
    case s_barrier: w.waiting = true; return false;
    case s_endpgm:
      await(w, 0, 0);
      w.ended = true;
      return false;
    case s_waitcnt: await(w, i.vm, i.lgkm); break;
    case s_load_dword: scalar_load(w, i, 1); break;
    case s_load_dwordx2: scalar_load(w, i, 2); break;
    case s_load_dwordx4: scalar_load(w, i, 4); break;
    case s_load_dwordx8: scalar_load(w, i, 8); break;
    case s_memrealtime: scalar_load(w, i, 2); break;
    // memory
    case buffer_inv:
      w.block->way->invalidate(i.cache & 2 ? (i.cache & 1 ? SYSTEM : AGENT) : NEAR);
      break;
    case buffer_wbl2: {
      auto made = std::make_unique<Access>();
      made->what = Access::WRITE_BACK;
      made->scope = i.cache & 2 ? (i.cache & 1 ? SYSTEM : AGENT) : NEAR;
      made->order = ++order;
      made->vm = true;
      issue(w, std::move(made));
      break;
    }
    case flat_load_dword: memory_access(w, i, true, false, 4); break;
    case flat_load_dwordx2: memory_access(w, i, true, false, 8); break;
    case flat_load_dwordx3: memory_access(w, i, true, false, 12); break;
    case flat_load_dwordx4: memory_access(w, i, true, false, 16); break;
    case flat_load_ushort: memory_access(w, i, true, false, 2); break;
    case flat_store_dword: memory_access(w, i, true, true, 4); break;
    case flat_store_dwordx2: memory_access(w, i, true, true, 8); break;
    case flat_store_dwordx3: memory_access(w, i, true, true, 12); break;
    case flat_store_dwordx4: memory_access(w, i, true, true, 16); break;
    case flat_store_short: memory_access(w, i, true, true, 2); break;
    case global_load_dword: memory_access(w, i, false, false, 4); break;
    case global_load_dwordx2: memory_access(w, i, false, false, 8); break;
    case global_load_dwordx3: memory_access(w, i, false, false, 12); break;
    case global_load_dwordx4: memory_access(w, i, false, false, 16); break;
    case global_load_sbyte: memory_access(w, i, false, false, 1); break;
    case global_load_ushort: memory_access(w, i, false, false, 2); break;
    case global_store_dword: memory_access(w, i, false, true, 4); break;
    case global_store_dwordx2: memory_access(w, i, false, true, 8); break;
    case global_store_dwordx3: memory_access(w, i, false, true, 12); break;
    case global_store_dwordx4: memory_access(w, i, false, true, 16); break;
    case global_store_short: memory_access(w, i, false, true, 2); break;
    case global_atomic_add:
    case global_atomic_cmpswap: atomic(w, i); break;
    case ds_read_b32: local_access(w, i, false, 4, false); break;
    case ds_read_b64: local_access(w, i, false, 8, false); break;
    case ds_read_b128: local_access(w, i, false, 16, false); break;
    case ds_read_i8: local_access(w, i, false, 1, false); break;
    case ds_read_u16: local_access(w, i, false, 2, false); break;
    case ds_read2_b32: local_access(w, i, false, 4, true); break;
    case ds_read2st64_b32: local_access(w, i, false, 4, true, 0, 64); break;
    case ds_read2_b64: local_access(w, i, false, 8, true); break;
    case ds_write_b32: local_access(w, i, true, 4, false); break;
    case ds_write_b64: local_access(w, i, true, 8, false); break;
    case ds_write_b128: local_access(w, i, true, 16, false); break;
    case ds_write_b16: local_access(w, i, true, 2, false); break;
    case ds_write_b16_d16_hi: local_access(w, i, true, 2, false, 16); break;
    case ds_write_b8: local_access(w, i, true, 1, false); break;
    case ds_write2_b32: local_access(w, i, true, 4, true); break;
    case ds_write2_b64: local_access(w, i, true, 8, true); break;
    case ds_bpermute_b32: {  // of active lanes; 0 from others
      auto made = std::make_unique<Access>();
      made->what = Access::LOCAL_WRITE;
      made->lgkm = true;
      made->to = o[0].value;
      made->registers = 1;
      const u64 exec = w.mask(EXEC);
      u32 found[LANES] = {};
      for (int l = 0; l < LANES; ++l) {
        const int from = int((raw(w, o[1], l) + u32(i.offset)) / 4 % LANES);
        if (exec >> from & 1) found[l] = raw(w, o[2], from);
      }
      issue(w, std::move(made));
      for (int l = 0; l < LANES; ++l)
        if (exec >> l & 1) w.v[o[0].value][l] = found[l];
      break;
    }
    // vector, integers
    case v_mov_b32: LANE(UU(1)); break;
    case v_mov_b64: lanes64(w, i, [&](int l) { return raw64(w, o[1], l); }); break;
    case v_add_u32: LANE(UU(1) + UU(2)); break;
    case v_sub_u32: LANE(UU(1) - UU(2)); break;
    case v_subrev_u32: LANE(UU(2) - UU(1)); break;
    case v_add3_u32: LANE(UU(1) + UU(2) + UU(3)); break;
    case v_add_lshl_u32: LANE((UU(1) + UU(2)) << (UU(3) & 31)); break;
    case v_add_u16: LANE((UU(1) + UU(2)) & 0xFFFF); break;
    case v_sub_u16: LANE((UU(1) - UU(2)) & 0xFFFF); break;
    case v_add_co_u32:
    case v_addc_co_u32: {  // to, carry out, a, b; carry in
      const u64 in = i.name == v_addc_co_u32 ? S64(4) : 0, exec = w.mask(EXEC);
      u64 out = 0;
      for (int l = 0; l < LANES; ++l) {
        if (!(exec >> l & 1)) continue;
        const u64 sum = u64(UU(2)) + UU(3) + (in >> l & 1);
        w.v[o[0].value][l] = u32(sum);
        out |= (sum >> 32) << l;
      }
      w.set_mask(o[1].value, out);
      break;
    }
    case v_and_b32: LANE(UU(1) & UU(2)); break;
    case v_or_b32: LANE(UU(1) | UU(2)); break;
    case v_or3_b32: LANE(UU(1) | UU(2) | UU(3)); break;
    case v_xor_b32: LANE(UU(1) ^ UU(2)); break;
    case v_xad_u32: LANE((UU(1) ^ UU(2)) + UU(3)); break;
    case v_and_or_b32: LANE((UU(1) & UU(2)) | UU(3)); break;
    case v_lshl_or_b32: LANE((UU(1) << (UU(2) & 31)) | UU(3)); break;
    case v_lshl_add_u32: LANE((UU(1) << (UU(2) & 31)) + UU(3)); break;
    case v_lshl_add_u64:
      lanes64(w, i, [&](int l) { return (raw64(w, o[1], l) << (UU(2) & 7)) + raw64(w, o[3], l); });
      break;
    case v_lshlrev_b32: LANE(UU(2) << (UU(1) & 31)); break;
    case v_lshrrev_b32: LANE(UU(2) >> (UU(1) & 31)); break;
    case v_ashrrev_i32: LANE(u32(II(2) >> (UU(1) & 31))); break;
    case v_lshlrev_b64:
      lanes64(w, i, [&](int l) { return raw64(w, o[2], l) << (UU(1) & 63); });
      break;
    case v_lshlrev_b16: LANE(UU(2) << (UU(1) & 15) & 0xFFFF); break;
    case v_lshrrev_b16: LANE((UU(2) & 0xFFFF) >> (UU(1) & 15)); break;
    case v_ashrrev_i16: LANE(u32(int(int16_t(UU(2))) >> (UU(1) & 15)) & 0xFFFF); break;
    case v_bfe_i32: {
      lanes(w, i, [&](const Instruction& i, int l) -> u32 {
        const u32 at = UU(2) & 31, wide = UU(3) & 31;
        return wide ? u32(int(UU(1) << (32 - at - wide)) >> (32 - wide)) : 0;
      });
      break;
    }
    case v_bfe_u32: LANE(UU(1) >> (UU(2) & 31) & ((1u << (UU(3) & 31)) - 1)); break;
    case v_bfrev_b32:
      LANE(reversed(UU(1)));
      break;
    case v_mul_lo_u32: LANE(UU(1) * UU(2)); break;
    case v_mul_hi_u32: LANE(u32((u64(UU(1)) * UU(2)) >> 32)); break;
    case v_mul_hi_i32: LANE(u32((int64_t(II(1)) * II(2)) >> 32)); break;
    case v_mul_u32_u24: LANE((UU(1) & 0xFFFFFF) * (UU(2) & 0xFFFFFF)); break;
    // no carry is read
    case v_mad_i64_i32:
      lanes64(w, i, [&](int l) { return u64(int64_t(II(2)) * II(3)) + raw64(w, o[4], l); });
      break;
    case v_mad_u64_u32:
      lanes64(w, i, [&](int l) { return u64(UU(2)) * UU(3) + raw64(w, o[4], l); });
      break;
    case v_min_i32: LANE(u32(std::min(II(1), II(2)))); break;
    case v_max_i32: LANE(u32(std::max(II(1), II(2)))); break;
    case v_mbcnt_lo_u32_b32:
      LANE(u32(__builtin_popcount(UU(1) & (l < 32 ? (1u << l) - 1 : ~0u))) + UU(2));
      break;
    case v_mbcnt_hi_u32_b32:
      LANE(u32(__builtin_popcount(UU(1) & (l < 32 ? 0u : (1u << (l - 32)) - 1))) + UU(2));
      break;
    case v_cndmask_b32: {
      const u64 mask = S64(3);
      LANE(mask >> l & 1 ? as_bits(FF(2)) : as_bits(FF(1)));
      break;
    }
    case v_readfirstlane_b32:
      set(w.v[o[1].value][w.mask(EXEC) ? __builtin_ctzll(w.mask(EXEC)) : 0]);
      break;
    case v_readlane_b32: set(w.v[o[1].value][S(2) & 63]); break;
    case v_writelane_b32: w.v[o[0].value][S(2) & 63] = S(1); break;
    case v_pack_b32_f16: LANE((UU(1) & 0xFFFF) | UU(2) << 16); break;
    case v_perm_b32:
      LANE([&] {
        const u64 both = u64(UU(1)) << 32 | UU(2);
        u32 out = 0;
        for (int b = 0; b < 4; ++b) {
          const u32 pick = UU(3) >> 8 * b & 0xFF;
          if (pick > 7 && pick != 12) fault(w, i, "a byte that is not copied");
          out |= (pick == 12 ? 0 : u32(both >> 8 * pick & 0xFF)) << 8 * b;
        }
        return out;
      }());
      break;
    // vector, FP32
    case v_add_f32: LANE_F(FF(1) + FF(2)); break;
    case v_sub_f32: LANE_F(FF(1) - FF(2)); break;
    case v_mul_f32: LANE_F(FF(1) * FF(2)); break;
    case v_fma_f32: LANE_F(std::fmaf(FF(1), FF(2), FF(3))); break;
    case v_fmac_f32: LANE_F(std::fmaf(FF(1), FF(2), as_float(w.v[o[0].value][l]))); break;
    case v_fmamk_f32: LANE_F(std::fmaf(FF(1), FF(2), FF(3))); break;
    case v_fmaak_f32: LANE_F(std::fmaf(FF(1), FF(2), FF(3))); break;
    case v_max_f32: LANE_F(std::fmax(FF(1), FF(2))); break;
    case v_min_f32: LANE_F(std::fmin(FF(1), FF(2))); break;
    case v_rcp_f32:
    case v_rcp_iflag_f32: LANE_F(1.0f / FF(1)); break;
    case v_sqrt_f32: LANE_F(std::sqrt(FF(1))); break;
    case v_exp_f32: LANE_F(std::exp2(FF(1))); break;
    case v_rndne_f32: LANE_F(std::nearbyint(FF(1))); break;
    case v_ldexp_f32: LANE_F(std::ldexp(FF(1), std::max(-400, std::min(400, II(2))))); break;
    case v_cvt_f32_i32: LANE_F(float(II(1))); break;
    case v_cvt_f32_u32: LANE_F(float(UU(1))); break;
    case v_cvt_i32_f32: LANE(to_int(FF(1), -2147483648.0, 2147483647.0)); break;
    case v_cvt_u32_f32: LANE(to_int(FF(1), 0.0, 4294967295.0)); break;
    case v_cvt_f16_f32: LANE(half_bits(FF(1))); break;
    case v_cvt_f32_f16: LANE_F(changed(half(u16(UU(1))), i.operand[1])); break;
    case v_div_scale_f32:  // to, flag, quotient's part, denominator, numerator: no scale is needed
      w.set_mask(o[1].value, 0);
      LANE_F(FF(2));
      break;
    case v_div_fmas_f32: LANE_F(std::fmaf(FF(1), FF(2), FF(3))); break;
    case v_div_fixup_f32:
      LANE_F([&] {
        const float by = FF(2), of = FF(3);
        return std::isnormal(by) && std::isnormal(of)
                   ? std::copysign(FF(1), std::signbit(by) == std::signbit(of) ? 1.0f : -1.0f)
                   : of / by;
      }());
      break;
    case v_dot2c_f32_f16:
    case v_dot2_f32_f16: {
      if (i.op_sel || (i.name == v_dot2_f32_f16 && i.op_sel_hi != 7))
        fault(w, i, "halves in another order");
      LANE_F([&] {
        const u32 a = UU(1), b = UU(2);
        const float sum = i.name == v_dot2_f32_f16 ? FF(3) : as_float(w.v[o[0].value][l]);
        return std::fmaf(half(u16(a >> 16)), half(u16(b >> 16)),
                         std::fmaf(half(u16(a)), half(u16(b)), sum));
      }());
      break;
    }
    case v_fma_mix_f32:
      LANE_F(std::fmaf(mixed(w, i, 1, l), mixed(w, i, 2, l), mixed(w, i, 3, l)));
      break;
    case v_fma_mixlo_f16:
      LANE((w.v[o[0].value][l] & 0xFFFF0000u) |
           half_bits(std::fmaf(mixed(w, i, 1, l), mixed(w, i, 2, l), mixed(w, i, 3, l))));
      break;
    case v_pk_add_f32:
    case v_pk_mul_f32:
    case v_pk_fma_f32:
      lanes64(w, i, [&](int l) {
        u32 made[2];
        for (int h = 0; h < 2; ++h) {
          const float a = packed(w, i, 1, l, h), b = packed(w, i, 2, l, h);
          made[h] = as_bits(i.name == v_pk_add_f32   ? a + b
                            : i.name == v_pk_mul_f32 ? a * b
                                                     : std::fmaf(a, b, packed(w, i, 3, l, h)));
        }
        return u64(made[0]) | u64(made[1]) << 32;
      });
      break;
    // comparisons
    case v_cmp_eq_f32: COMPARE(FF(1) == FF(2)); break;
    case v_cmp_ge_f32: COMPARE(FF(1) >= FF(2)); break;
    case v_cmp_gt_f32: COMPARE(FF(1) > FF(2)); break;
    case v_cmp_le_f32: COMPARE(FF(1) <= FF(2)); break;
    case v_cmp_lt_f32: COMPARE(FF(1) < FF(2)); break;
    case v_cmp_lg_f32: COMPARE(FF(1) < FF(2) || FF(1) > FF(2)); break;
    case v_cmp_neq_f32: COMPARE(!(FF(1) == FF(2))); break;
    case v_cmp_nge_f32: COMPARE(!(FF(1) >= FF(2))); break;
    case v_cmp_ngt_f32: COMPARE(!(FF(1) > FF(2))); break;
    case v_cmp_nle_f32: COMPARE(!(FF(1) <= FF(2))); break;
    case v_cmp_nlt_f32: COMPARE(!(FF(1) < FF(2))); break;
    case v_cmp_o_f32: COMPARE(FF(1) == FF(1) && FF(2) == FF(2)); break;
    case v_cmp_u_f32: COMPARE(FF(1) != FF(1) || FF(2) != FF(2)); break;
    case v_cmp_class_f32:
      COMPARE([&] {
        const float f = FF(1);
        const bool minus = std::signbit(f);
        const int kind = f != f             ? 1
                         : std::isinf(f)    ? (minus ? 2 : 9)
                         : f == 0           ? (minus ? 5 : 6)
                         : std::isnormal(f) ? (minus ? 3 : 8)
                                            : (minus ? 4 : 7);
        return UU(2) >> kind & 1;
      }());
      break;
    case v_cmp_eq_u32: COMPARE(UU(1) == UU(2)); break;
    case v_cmp_ne_u32: COMPARE(UU(1) != UU(2)); break;
    case v_cmp_ge_u32: COMPARE(UU(1) >= UU(2)); break;
    case v_cmp_gt_u32: COMPARE(UU(1) > UU(2)); break;
    case v_cmp_le_u32: COMPARE(UU(1) <= UU(2)); break;
    case v_cmp_lt_u32: COMPARE(UU(1) < UU(2)); break;
    case v_cmp_ge_i32: COMPARE(II(1) >= II(2)); break;
    case v_cmp_gt_i32: COMPARE(II(1) > II(2)); break;
    case v_cmp_le_i32: COMPARE(II(1) <= II(2)); break;
    case v_cmp_gt_i16: COMPARE(int16_t(UU(1)) > int16_t(UU(2))); break;
    case v_cmp_lt_i16: COMPARE(int16_t(UU(1)) < int16_t(UU(2))); break;
    case v_cmp_lt_i32: COMPARE(II(1) < II(2)); break;
    case v_cmp_ne_u16: COMPARE(u16(UU(1)) != u16(UU(2))); break;
    case v_cmp_eq_u64: COMPARE(raw64(w, o[1], l) == raw64(w, o[2], l)); break;
    case v_cmp_ne_u64: COMPARE(raw64(w, o[1], l) != raw64(w, o[2], l)); break;
    case v_cmp_ge_u64: COMPARE(raw64(w, o[1], l) >= raw64(w, o[2], l)); break;
    case v_cmp_gt_u64: COMPARE(raw64(w, o[1], l) > raw64(w, o[2], l)); break;
    case v_cmp_lt_u64: COMPARE(raw64(w, o[1], l) < raw64(w, o[2], l)); break;
  }
  return true;
}

void Machine::run() {
  std::vector<Wave*> alive;
  for (const auto& w : waves) alive.push_back(w.get());
  while (!alive.empty()) {
    Wave& w = *alive[random.below(u32(alive.size()))];
    if (w.waiting) {
      bool all = true;
      for (const Wave* other : w.block->waves) all &= other->waiting || other->ended;
      if (!all) continue;
      for (Wave* other : w.block->waves) other->waiting = false;
    }
    for (u32 burst = 1 + random.below(96); burst && step(w); --burst) {}
    if (!w.accesses.empty()) {
      const u32 tries = random.below(4);
      for (u32 t = 0; t < tries; ++t) perform_in_order(w, random.below(u32(w.accesses.size())));
    }
    if (w.ended) alive.erase(std::find(alive.begin(), alive.end(), &w));
    if (executed > most)
      throw Fault("more than " + std::to_string(most) + " instructions: the kernel does not end");
  }
  for (auto& gpu : gpus) {
    for (auto& die : gpu->dies) die->write_back();
    gpu->own.write_back();
  }
}

}  // namespace gfx

extern "C" const char* gfx942_names() {
  static const std::string all = [] {
    std::string text;
    for (const char* name : gfx::SAID) text += std::string(name) + "\n";
    return text;
  }();
  return all.c_str();
}

extern "C" int gfx942_record_ints() { return int(sizeof(gfx::Instruction) / sizeof(int)); }

// Runs the blocks of all GPUs to their end. `places`: GPU and die of each block. Returns the number
// of executed instructions, or -1 and the reason in `said`.
extern "C" long gfx942_run(const int* records, int count, unsigned long base, int entry,
                           const unsigned long* kernargs, int lds_bytes, int blocks,
                           const int* places, int gpus, int dies, int threads,
                           const unsigned long* regions, int region_count, unsigned long seed,
                           unsigned long most, unsigned* reached, char* said, int room) {
  using namespace gfx;
  try {
    Machine m;
    m.program = reinterpret_cast<const Instruction*>(records);
    m.count = count;
    m.base = base;
    m.random.state = seed;
    m.most = most;
    m.reached = reached;
    const bool forgetful = seed % 2;  // caches lose lines; else they keep what nobody drops
    for (int n = 0; n < count; ++n) m.index[m.program[n].at] = n;
    for (int r = 0; r < region_count; ++r)
      m.memory.regions.push_back({regions[2 * r], regions[2 * r + 1]});
    for (int g = 0; g < gpus; ++g)
      m.gpus.push_back(std::make_unique<Gpu>(m.memory, m.random, dies, forgetful));
    for (int b = 0; b < blocks; ++b) {
      const int g = places[3 * b], die = places[3 * b + 1];
      auto block = std::make_unique<BlockState>();
      block->way = std::make_unique<Way>(
          m.memory, *m.gpus[size_t(g)], *m.gpus[size_t(g)]->dies[size_t(die)], m.random, forgetful);
      block->die = die;
      block->number = b;
      block->local.assign(size_t(lds_bytes), 0xA5);
      for (int t = 0; t < threads; t += LANES) {
        auto wave = std::make_unique<Wave>();
        memset(wave->v, 0xA5, sizeof wave->v);
        memset(wave->awaited, 0, sizeof wave->awaited);
        memset(wave->s, 0xA5, sizeof wave->s);
        memset(wave->s_awaited, 0, sizeof wave->s_awaited);
        for (int l = 0; l < LANES; ++l) wave->v[0][l] = u32(t + l);
        wave->set_mask(0, kernargs[g]);
        wave->s[2] = u32(places[3 * b + 2]);  // the block's number in its launch
        wave->set_mask(EXEC, ~0ull);
        wave->pc = m.index.at(entry);
        wave->block = block.get();
        block->waves.push_back(wave.get());
        m.waves.push_back(std::move(wave));
      }
      m.blocks.push_back(std::move(block));
    }
    m.run();
    return long(m.executed);
  } catch (const std::exception& error) {
    snprintf(said, size_t(room), "%s", error.what());
    return -1;
  }
}

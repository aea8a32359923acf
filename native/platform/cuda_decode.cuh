// Low-bit weights of a prompt pass, decoded to rows of the plan's weight type: products read these
// from the device's memory as they read a 16-bit stream's. tests/native/chunk.cpp stands in for
// the machine.
#pragma once

namespace twin {

// A load of 16 bytes of a tile, or as many loads as CODED_PACK columns of a row take, by a thread.
template <Code CODE>
struct Decoder {
  static constexpr int COLUMNS = CODED_PACK ? CODED_PACK : 16, BITS = code_bits(CODE);
  static constexpr int LOADS = COLUMNS * BITS > 8 * UNIT_BYTES ? COLUMNS * BITS / (8 * UNIT_BYTES)
                                                               : 1;
  static constexpr int PAIR = COLUMNS * BITS < 8 * UNIT_BYTES ? 2 : 1;  // rows of a load
  static constexpr int AT_ONCE = 4 / LOADS;  // whose loads a thread has under way together
  static constexpr int WORDS = COLUMNS * type_bytes(WEIGHT) / 4;  // of a row, decoded
  static constexpr int BLOCK = code_block(CODE);
  static constexpr Scale SCALE = code_scale(CODE);
  static_assert(COLUMNS * BITS * PAIR == 8 * UNIT_BYTES * LOADS, "whole loads");

  u32 word[LOADS * UNIT_BYTES / 4];
  float scale[PAIR], zero[PAIR];

  // Columns from COLUMNS * unit on, of row PAIR * line of a tile and of the next where it has two.
  __device__ __forceinline__ void load(const u8* tile, int rows, int cols, int line, int unit) {
    const long pitch = long(cols) * BITS / 8;  // of rows
    const u8* at = tile + line * PAIR * pitch + unit * UNIT_BYTES;
#pragma unroll
    for (int l = 0; l < LOADS; ++l) {
      const float4 four = load_once(reinterpret_cast<const float*>(at + l * (pitch / LOADS)));
      word[4 * l] = bits_as<u32>(four.x), word[4 * l + 1] = bits_as<u32>(four.y);
      word[4 * l + 2] = bits_as<u32>(four.z), word[4 * l + 3] = bits_as<u32>(four.w);
    }
    if constexpr (CODE != Code::PLAIN) {
      const Scales scales = {CODE, tile + whole_rows(CODE, rows) * pitch, scaled_rows(rows),
                             BLOCK ? (cols + BLOCK - 1) / (BLOCK ? BLOCK : 1) : 1};
      const int block = BLOCK ? unit * COLUMNS / (BLOCK ? BLOCK : 1) : 0;
#pragma unroll
      for (int r = 0; r < PAIR; ++r) {
        scale[r] = scales.of(line * PAIR + r, block);
        zero[r] = scales.zero(line * PAIR + r, block);
      }
    }
  }

  // Codes of one row, before its zero point and its scale.
  __device__ __forceinline__ float value(int row, int column) const {
    constexpr Element ELEMENT = code_element(CODE);
    if constexpr (BITS == 4) {
      const u32 code = word[row * 2 + column / 8] >> 4 * (column % 8) & 15u;
      // integers in the last bits of 2^23: a conversion takes four times as long
      if constexpr (ELEMENT == Element::INT4) return bits_as<float>(0x4B000000u | code) - 0x1p23f;
      return coded_value(ELEMENT, code);
    } else {
      const u32 all = word[column / 4];
      if constexpr (ELEMENT == Element::INT8)
        return bits_as<float>(
                   bytes_of(all ^ 0x80808080u, 0x4B000000u, 0x7650u | u32(column % 4))) -
               (0x1p23f + 128.0f);
      float four[4];
      four_e4m3(all, four);  // once for four neighbours, whose callers are unrolled
      return four[column % 4];
    }
  }

  __device__ __forceinline__ static float bounded(float value) {
    if constexpr (WEIGHT != Type::FP16) return value;
    return value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value;
  }

  // One row's numbers as the weight type has them.
  __device__ __forceinline__ void decode(int row, u32 (&made)[WORDS]) const {
    if constexpr (CODE == Code::PLAIN) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) made[i] = word[i];
    } else {
      const float by = scale[row], less = zero[row];
      const auto number = [&](int column) {
        const float code = value(row, column);
        return bounded((code_element(CODE) == Element::INT4 ? code - less : code) * by);
      };
#pragma unroll
      for (int i = 0; i < WORDS; ++i) {
        if constexpr (WEIGHT == Type::FP32) made[i] = bits_as<u32>(number(i));
        else made[i] = packed<WEIGHT>(number(2 * i), number(2 * i + 1));
      }
    }
  }
  __device__ __forceinline__ void store(int row, u8* to) const {
    u32 made[WORDS];
    decode(row, made);
#pragma unroll
    for (int i = 0; i < WORDS; i += 4)
      *reinterpret_cast<uint4*>(to + 4 * i) =
          uint4{made[i], made[i + 1], made[i + 2], made[i + 3]};
  }

  // This thread's share of a tile, one of `threads`; rows of `to` have a pitch of `width` elements.
  __device__ __forceinline__ static void tile(const u8* tile, int rows, int cols, u8* to,
                                              int width, int me, int threads) {
    const int units = cols / COLUMNS, count = (rows + PAIR - 1) / PAIR * units;
#pragma unroll 1
    for (int first = me; first < count; first += AT_ONCE * threads) {
      Decoder some[AT_ONCE];
      int line[AT_ONCE], unit[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int at = first + i * threads < count ? first + i * threads : first;
        line[i] = int(u32(at) / u32(units)), unit[i] = at - line[i] * units;
        some[i].load(tile, rows, cols, line[i], unit[i]);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (first + i * threads >= count) continue;
#pragma unroll
        for (int r = 0; r < PAIR; ++r)
          if (line[i] * PAIR + r < rows)
            some[i].store(r, to + (long(line[i] * PAIR + r) * width + unit[i] * COLUMNS) *
                                      type_bytes(WEIGHT));
      }
    }
  }
};

// Calls use(Decoder<code>{}) with the stage's code, one of `OF`, which has a bit for each.
template <u32 OF = CODES, int NUMBER = facts::CODE_KINDS, class Stage, class Use>
__device__ __forceinline__ void with_decoder(const Stage& stage, Use use) {
  if constexpr (NUMBER < 0) {
  } else if constexpr ((OF >> NUMBER & 1u) == 0) {
    with_decoder<OF, NUMBER - 1>(stage, use);
  } else {
    if (code_of(stage) == Code(NUMBER)) return use(Decoder<Code(NUMBER)>{});
    with_decoder<OF, NUMBER - 1>(stage, use);
  }
}

// The codes of experts' rows, those of down projections or those that feed them.
template <bool DOWN>
constexpr int EXPERT_CODE = DOWN ? RoutedDown::code : RoutedUp::code;
template <bool DOWN>
constexpr u32 EXPERT_CODES = EXPERT_CODE<DOWN> < 0 ? CODES : 1u << (EXPERT_CODE<DOWN> & 31);

// Bytes of so many rows from the first of a row group on.
template <class Stage>
__device__ __forceinline__ u32 coded_rows_bytes(const Stage& stage, int rows) {
  const int slices = stage.cols / stage.tile_cols;
  const bool rest = stage.cols % stage.tile_cols != 0;
  const auto group = [&](int high) {
    return u32(high ? slices * coded_bytes(stage, high, true) +
                          (rest ? coded_bytes(stage, high, false) : 0)
                    : 0);
  };
  return u32(rows / stage.tile_rows) * group(stage.tile_rows) + group(rows % stage.tile_rows);
}

// `rows` rows from the first of a row group on, whose tiles follow each other from `from` on, to
// rows of all the stage's columns.
template <class Stage>
__device__ __forceinline__ void decode_rows(const Stage& stage, const u8* from, int rows, u8* to,
                                            int me, int threads) {
  constexpr u32 AHEAD = 48 << 10;  // on their way to the second-level cache, 6 MiB of all blocks
  const u32 all = coded_rows_bytes(stage, rows);
  if (me == 0 && all) prefetch_weights(from, all < AHEAD ? all : AHEAD);
  with_decoder(stage, [&](auto decoder) {
    u32 at = 0;
#pragma unroll 1
    for (int row = 0; row < rows; row += stage.tile_rows) {
      const int high = rows - row < stage.tile_rows ? rows - row : stage.tile_rows;
#pragma unroll 1
      for (int col = 0; col < stage.cols; col += stage.tile_cols) {
        const int wide = stage.cols - col < stage.tile_cols ? stage.cols - col : stage.tile_cols;
        const u32 bytes = u32(coded_bytes(stage, high, wide == stage.tile_cols));
        if (me == 0 && at + AHEAD < all)
          prefetch_weights(from + at + AHEAD, all - at - AHEAD < bytes ? all - at - AHEAD : bytes);
        decltype(decoder)::tile(
            from + at, high, wide,
            to + (long(row) * stage.cols + col) * type_bytes(WEIGHT), stage.cols, me, threads);
        at += bytes;
      }
    }
  });
}

}  // namespace twin

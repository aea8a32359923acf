// GGUF's blocks on the host. A tile interleaves BLOCK_ROWS rows: for each block of columns the
// words of these rows' codes and narrow scales, [word][row], then numbers in FP16
// (twin/models/codes/gguf.py). So a vector holds a word, four codes, of as many rows as it has
// lanes; lanes are never added up, and a row's sum has the same order on every machine.
//
// A stage's inputs are integers of 16 bits, scaled by the largest of their 32 neighbours
// (`Inputs`), so each is off by at most 1 in 65,000 of that one. Products and sums of a group are
// exact; its scale, and what groups add up to, are FP32.
#pragma once

namespace twin {

// arrays of vectors stay in registers
#if defined(__clang__)
#define TWIN_EVERY _Pragma("unroll")
#else
#define TWIN_EVERY _Pragma("GCC unroll 16")
#endif

constexpr int INPUT_GROUP = 32;      // columns that share a scale of the inputs
constexpr int LARGEST_INPUT = 32639;  // whose upper and lower halves, both signed, are bytes

// The machine's product of four codes of a lane, unsigned bytes, and four inputs. Where it takes
// bytes alone, `a` has the upper halves of the inputs and `b` the lower ones; else `a` the first
// and the third as 16 bits, `b` the second and the fourth.
#if (defined(__AVX512VNNI__) && VECTOR_BYTES == 64) || (defined(__AVXVNNI__) && VECTOR_BYTES == 32)
constexpr bool BYTE_PRODUCTS = true;
#else
constexpr bool BYTE_PRODUCTS = false;
#endif

#if VECTOR_BYTES == 64
typedef int whole_ints __attribute__((vector_size(64)));
typedef short whole_shorts __attribute__((vector_size(64)));
#else
typedef int whole_ints __attribute__((vector_size(VECTOR_BYTES)));
typedef short whole_shorts __attribute__((vector_size(VECTOR_BYTES)));
#endif

// sum += what `two` and `x`, each pairs of 16 bits in a lane, have as products
__forceinline__ vint add_pairs(vint sum, vint two, vint x) {
#if defined(__AVX512BW__) && VECTOR_BYTES == 64 && defined(__clang__)
  return sum + bits_as<vint>(__builtin_ia32_pmaddwd512(bits_as<whole_shorts>(two),
                                                       bits_as<whole_shorts>(x)));
#elif defined(__AVX512BW__) && VECTOR_BYTES == 64
  return sum + bits_as<vint>(__builtin_ia32_pmaddwd512_mask(
                   bits_as<whole_shorts>(two), bits_as<whole_shorts>(x), whole_ints{}, 0xFFFF));
#elif defined(__AVX2__) && VECTOR_BYTES == 32
  return sum + bits_as<vint>(
                   __builtin_ia32_pmaddwd256(bits_as<whole_shorts>(two), bits_as<whole_shorts>(x)));
#elif defined(__SSE2__) && VECTOR_BYTES == 16
  return sum + bits_as<vint>(
                   __builtin_ia32_pmaddwd128(bits_as<whole_shorts>(two), bits_as<whole_shorts>(x)));
#else
  return sum + (two & 0xFFFF) * (x << 16 >> 16) + (two >> 16) * (x >> 16);
#endif
}

// a and b += the products of a word of codes in each lane with the inputs `xa`, `xb`
__forceinline__ void add_products(vint& a, vint& b, vu32 codes, u32 xa, u32 xb) {
  const vint ups = vint{} + int(xa), downs = vint{} + int(xb);
#if defined(__AVX512VNNI__) && VECTOR_BYTES == 64
#if defined(__clang__)
#define TWIN_BYTES_TIMES __builtin_ia32_vpdpbusd512
#else
#define TWIN_BYTES_TIMES __builtin_ia32_vpdpbusd_v16si
#endif
#elif defined(__AVXVNNI__) && VECTOR_BYTES == 32
#if defined(__clang__)
#define TWIN_BYTES_TIMES __builtin_ia32_vpdpbusd256
#else
#define TWIN_BYTES_TIMES __builtin_ia32_vpdpbusd_v8si
#endif
#endif
#if defined(TWIN_BYTES_TIMES)
  a = bits_as<vint>(TWIN_BYTES_TIMES(bits_as<whole_ints>(a), bits_as<whole_ints>(codes),
                                     bits_as<whole_ints>(ups)));
  b = bits_as<vint>(TWIN_BYTES_TIMES(bits_as<whole_ints>(b), bits_as<whole_ints>(codes),
                                     bits_as<whole_ints>(downs)));
#else
  a = add_pairs(a, bits_as<vint>(codes & 0x00FF00FFu), ups);
  b = add_pairs(b, bits_as<vint>(codes >> 8 & 0x00FF00FFu), downs);
#endif
}

__forceinline__ vint both(vint a, vint b) { return BYTE_PRODUCTS ? (a << 8) + b : a + b; }

// Inputs of a stage as integers, of one token or several.
struct Inputs {
  const u32 *a, *b;     // [columns / 4] as add_products takes them
  const float* scale;   // [columns / INPUT_GROUP]
  const int* sum;       // [columns / 16] of the integers
  const float* weight;  // [columns / 16] the same times the scale

  Inputs from(int column) const {
    return {a + column / 4, b + column / 4, scale + column / INPUT_GROUP, sum + column / 16,
            weight + column / 16};
  }
};

// Where a block keeps them: [tokens][columns].
struct InputRoom {
  char* memory = nullptr;
  long held = 0;
  int columns = 0;  // of a token, in whole groups
  int given = 0;    // of a token, as they were given
  const float* made_of = nullptr;
  bool open = false;  // for whoever looks by address

  ~InputRoom() { free(memory); }

  static long bytes(int columns) { return 2l * columns + columns / INPUT_GROUP * 4 + columns / 2; }

  void make(const float* x, int cols, int tokens) {
    columns = (cols + INPUT_GROUP - 1) / INPUT_GROUP * INPUT_GROUP;
    made_of = x, given = cols;
    const long needed = bytes(columns) * tokens;
    if (needed > held) {
      free(memory);
      memory = static_cast<char*>(aligned_alloc(LINE, size_t(needed + LINE - 1) / LINE * LINE));
      if (!memory) broken("memory for a stage's inputs", __FILE__, __LINE__);
      held = needed;
    }
    for (int token = 0; token < tokens; ++token)
      for (int c = 0; c < columns; c += INPUT_GROUP)
        group(x + long(token) * cols + c, cols - c < INPUT_GROUP ? cols - c : INPUT_GROUP,
              of(token).from(c));
  }

  Inputs of(int token) const {
    char* at = memory + bytes(columns) * token;
    const auto a = reinterpret_cast<const u32*>(at), b = a + columns / 4;
    const auto scale = reinterpret_cast<const float*>(b + columns / 4);
    const auto sum = reinterpret_cast<const int*>(scale + columns / INPUT_GROUP);
    return {a, b, scale, sum, reinterpret_cast<const float*>(sum + columns / 16)};
  }

  // Of what lies at `x`, which is a token's column of what they were made of.
  Inputs at(const float* x) const {
    const long offset = x - made_of;
    return of(int(offset / given)).from(int(offset % given));
  }

  // A group of `count` inputs; what is missing is zero. No number stays none.
  static void group(const float* x, int count, const Inputs& to) {
    constexpr int EACH = INPUT_GROUP / VECTOR;
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2**23: what is added to it has no fraction
    float filled[INPUT_GROUP];
    if (count < INPUT_GROUP) {
      for (int i = 0; i < INPUT_GROUP; ++i) filled[i] = i < count ? x[i] : 0.0f;
      x = filled;
    }
    vfloat value[EACH], most = {}, doubt = {};
    TWIN_EVERY for (int i = 0; i < EACH; ++i) {
      value[i] = *reinterpret_cast<const vfloat*>(x + i * VECTOR);
      const vfloat size = bits_as<vfloat>(bits_as<vu32>(value[i]) & 0x7FFFFFFFu);
      most = size > most ? size : most;
      doubt += value[i] * 0.0f;
    }
    float largest = 0;
    for (int i = 0; i < VECTOR; ++i) largest = most[i] > largest ? most[i] : largest;
    const float none = sum_elements(doubt), scale = largest / float(LARGEST_INPUT) + none;
    const float by = none == 0 && largest > 0x1p-100f ? float(LARGEST_INPUT) / largest : 0.0f;
    alignas(LINE) int whole[INPUT_GROUP];
    int sums[2];
    TWIN_EVERY for (int i = 0; i < EACH; ++i) {
      const vfloat near = (by != 0 ? value[i] * by : vfloat{}) + ROUND;
      *reinterpret_cast<vint*>(whole + i * VECTOR) =
          (bits_as<vint>(near) & 0x7FFFFF) - 0x400000;  // what ROUND leaves of the mantissa
    }
    for (int half = 0; half < 2; ++half) {
      int sum = 0;
      for (int i = 0; i < 16; ++i) sum += whole[16 * half + i];
      sums[half] = sum;
    }
    if constexpr (BYTE_PRODUCTS) {
      u8 *const a = address(to.a), *const b = address(to.b);
      for (int i = 0; i < INPUT_GROUP; ++i) a[i] = u8((whole[i] + 128) >> 8);
      for (int i = 0; i < INPUT_GROUP; ++i) b[i] = u8(whole[i]);
    } else {
      u32 *const a = const_cast<u32*>(to.a), *const b = const_cast<u32*>(to.b);
      for (int i = 0; i < INPUT_GROUP; i += 4) {
        a[i / 4] = (u32(whole[i]) & 0xFFFFu) | u32(whole[i + 2]) << 16;
        b[i / 4] = (u32(whole[i + 1]) & 0xFFFFu) | u32(whole[i + 3]) << 16;
      }
    }
    const_cast<float*>(to.scale)[0] = scale;
    for (int i = 0; i < 2; ++i) {
      const_cast<int*>(to.sum)[i] = sums[i];
      const_cast<float*>(to.weight)[i] = float(sums[i]) * scale;
    }
  }
  static u8* address(const u32* at) { return reinterpret_cast<u8*>(const_cast<u32*>(at)); }
};

// ---- blocks -------------------------------------------------------------------------------------

constexpr int BLOCK_ROWS = facts::BLOCK_ROWS;

// Of VECTOR of a tile's rows.
__forceinline__ vu32 words_of(const u8* at) { return *reinterpret_cast<const vu32*>(at); }
__forceinline__ vfloat halves_of(const u8* at) { return load_vector<Type::FP16>(at); }
// Byte `i` of each word.
__forceinline__ vint signed_byte(vu32 words, int i) {
  return bits_as<vint>(words << (24 - 8 * i)) >> 24;
}
__forceinline__ vint unsigned_byte(vu32 words, int i) {
  return bits_as<vint>(words >> 8 * i & 255u);
}
__forceinline__ vfloat floats_of(vint whole) { return __builtin_convertvector(whole, vfloat); }

constexpr u32 LOW = 0x0F0F0F0Fu;

// A field of a block: `at` counts bytes of one row, as the file does.
struct BlockAt {
  const u8* block;
  int first;  // row

  const u8* word(int at) const { return block + at * BLOCK_ROWS + 4 * first; }
  const u8* half(int at) const { return block + at * BLOCK_ROWS + 2 * first; }
};

// 32 columns with a scale in FP16 and, with MINS, what is added to each: Q4_0, Q4_1, Q5_0, Q5_1,
// Q8_0. Fields: 4-bit codes (columns i and i + 16 in byte i) or bytes; the fifth bits, of column
// 4 * k + j in bit k of byte j; scale; addend.
template <int BITS, bool MINS, int ZERO>
struct Blocks32 {
  static constexpr int COLUMNS = 32, CODES = BITS == 8 ? 32 : 16, FIFTHS = BITS == 5 ? 4 : 0,
                       BYTES = CODES + FIFTHS + 2 + 2 * MINS;

  static __forceinline__ void add(vfloat& sum, BlockAt at, const Inputs& x) {
    vint a = {}, b = vint{} - ZERO * (x.sum[0] + x.sum[1]);
    if constexpr (BITS == 8) {
      TWIN_EVERY for (int k = 0; k < 8; ++k) add_products(a, b, words_of(at.word(4 * k)), x.a[k], x.b[k]);
    } else {
      const vu32 fifths = BITS == 5 ? words_of(at.word(CODES)) : vu32{};
      TWIN_EVERY for (int k = 0; k < 4; ++k) {
        const vu32 two = words_of(at.word(4 * k));
        vu32 low = two & LOW, high = two >> 4 & LOW;
        if constexpr (BITS == 5)
          low |= fifths << (4 - k) & 0x10101010u, high |= fifths >> k & 0x10101010u;
        add_products(a, b, low, x.a[k], x.b[k]);
        add_products(a, b, high, x.a[k + 4], x.b[k + 4]);
      }
    }
    const u8* scale = at.half(CODES + FIFTHS);
    sum += floats_of(both(a, b)) * (halves_of(scale) * x.scale[0]);
    if constexpr (MINS)
      sum += halves_of(at.half(CODES + FIFTHS + 2)) * (x.weight[0] + x.weight[1]);
  }
};

// 256 columns in groups of 32, each with a scale and what is taken off in six bits, multiples of
// two numbers in FP16: Q4_K, Q5_K. Fields: codes (of each 64 columns i and i + 32 in byte i); fifth
// bits (of column 32 * g + i in bit g of byte i); twelve bytes of scales; the two numbers.
template <int BITS>
struct BlocksOfSixBits {
  static constexpr int COLUMNS = 256, CODES = 128, FIFTHS = BITS == 5 ? 32 : 0,
                       SCALES = CODES + FIFTHS, BYTES = SCALES + 12 + 4;

  static __forceinline__ void add(vfloat& sum, BlockAt at, const Inputs& x) {
    vfloat scaled = {}, off = {};
    const vu32 scales = words_of(at.word(SCALES)), taken = words_of(at.word(SCALES + 4)),
               rest = words_of(at.word(SCALES + 8));
    TWIN_EVERY for (int c = 0; c < 4; ++c) {
      vint a[2] = {}, b[2] = {};
      TWIN_EVERY for (int k = 0; k < 8; ++k) {
        const vu32 two = words_of(at.word(32 * c + 4 * k));
        vu32 low = two & LOW, high = two >> 4 & LOW;
        if constexpr (BITS == 5) {
          const vu32 fifths = words_of(at.word(CODES + 4 * k));
          low |= (c < 2 ? fifths << (4 - 2 * c) : fifths >> (2 * c - 4)) & 0x10101010u;
          high |= (c < 2 ? fifths << (3 - 2 * c) : fifths >> (2 * c - 3)) & 0x10101010u;
        }
        const int at_low = 16 * c + k, at_high = at_low + 8;
        add_products(a[0], b[0], low, x.a[at_low], x.b[at_low]);
        add_products(a[1], b[1], high, x.a[at_high], x.b[at_high]);
      }
      TWIN_EVERY for (int i = 0; i < 2; ++i) {
        const int g = 2 * c + i;
        scaled += floats_of(both(a[i], b[i])) * (floats_of(six(scales, rest, 0, g)) * x.scale[g]);
        off += floats_of(six(taken, rest, 4, g)) * (x.weight[2 * g] + x.weight[2 * g + 1]);
      }
    }
    const u8* two = at.half(SCALES + 12);
    sum += halves_of(two) * scaled;
    sum -= halves_of(at.half(SCALES + 14)) * off;
  }
  // Number `g`: of the first four all six bits, of the others the upper two in `first`, and the
  // lower four in `rest` from bit `from` of a byte on.
  static __forceinline__ vint six(vu32 first, vu32 rest, int from, int g) {
    if (g < 4) return bits_as<vint>(first >> 8 * g & 63u);
    const int at = 8 * (g - 4);
    return bits_as<vint>((rest >> (at + from) & 15u) | (first >> (at + 6) & 3u) << 4);
  }
};

// 256 columns of six bits less 32 in groups of 16, each with a scale of eight bits, multiples of a
// number in FP16: Q6_K. With MINS what is taken off, too: what Q4_K, Q5_K and Q6_K have in common.
// Fields: lower four bits (of each 128 columns i and i + 64 in byte i); upper two (of column
// 32 * k + i in bits 2 * k of byte i); scales; what is taken off; the numbers.
template <bool MINS>
struct BlocksOfSixteen {
  static constexpr int COLUMNS = 256, UPPER = 128, SCALES = UPPER + 64, OFF = SCALES + 16,
                       NUMBER = OFF + 16 * MINS, BYTES = NUMBER + 2 + 2 * MINS;

  static __forceinline__ void add(vfloat& sum, BlockAt at, const Inputs& x) {
    vfloat scaled = {}, off = {};
    TWIN_EVERY for (int h = 0; h < 2; ++h)
      TWIN_EVERY for (int half = 0; half < 2; ++half) {  // of each of the four groups of 32
        vint a[4] = {}, b[4] = {};
        TWIN_EVERY for (int i = 0; i < 4; ++i) b[i] -= 32 * x.sum[8 * h + 2 * i + half];
        TWIN_EVERY for (int k = 4 * half; k < 4 * half + 4; ++k) {
          const vu32 first = words_of(at.word(64 * h + 4 * k)),
                     second = words_of(at.word(64 * h + 32 + 4 * k)),
                     upper = words_of(at.word(UPPER + 32 * h + 4 * k));
          const int from = 32 * h + k;
          const vu32 codes[4] = {(first & LOW) | (upper << 4 & 0x30303030u),
                                 (second & LOW) | (upper << 2 & 0x30303030u),
                                 (first >> 4 & LOW) | (upper & 0x30303030u),
                                 (second >> 4 & LOW) | (upper >> 2 & 0x30303030u)};
          TWIN_EVERY for (int i = 0; i < 4; ++i)
            add_products(a[i], b[i], codes[i], x.a[from + 8 * i], x.b[from + 8 * i]);
        }
        TWIN_EVERY for (int i = 0; i < 4; ++i) {
          const int g = 8 * h + 2 * i + half;
          scaled += floats_of(both(a[i], b[i])) *
                    (floats_of(signed_byte(words_of(at.word(SCALES + g / 4 * 4)), g % 4)) *
                     x.scale[g / 2]);
          if constexpr (MINS)
            off += floats_of(unsigned_byte(words_of(at.word(OFF + g / 4 * 4)), g % 4)) *
                   x.weight[g];
        }
      }
    sum += halves_of(at.half(NUMBER)) * scaled;
    if constexpr (MINS) sum -= halves_of(at.half(NUMBER + 2)) * off;
  }
};

// VECTOR rows of a tile, from `first` on.
template <class Blocks>
__forceinline__ vfloat dot_blocks(const u8* w, int first, int cols, Inputs x, u64 ahead) {
  constexpr int SIZE = Blocks::BYTES * BLOCK_ROWS;
  vfloat sum = {};
  for (int c = 0; c < cols; c += Blocks::COLUMNS, w += SIZE) {
    if (first == 0)
      for (int line = 0; line < SIZE; line += LINE) __builtin_prefetch(w + ahead + line, 0, 3);
    Blocks::add(sum, {w, first}, x);
    x = x.from(Blocks::COLUMNS);
  }
  return sum;
}

template <class Blocks>
TWIN_LARGE void dot_block_rows(const u8* w, int rows, int cols, Inputs x, float* sums, u64 ahead) {
  const long pitch = long(cols / Blocks::COLUMNS) * Blocks::BYTES * BLOCK_ROWS;
  for (int row = 0; row < rows; row += BLOCK_ROWS, w += pitch)
    for (int first = 0; first < BLOCK_ROWS && row + first < rows; first += VECTOR) {
      const vfloat sum = dot_blocks<Blocks>(w, first, cols, x, ahead);
      const int left = rows - row - first;
      __builtin_memcpy(sums + row + first, &sum, 4 * (left < VECTOR ? left : VECTOR));
    }
}

// The sums of a tile's rows.
inline void dot_in_blocks(Code code, const u8* w, int rows, int cols, const Inputs& x, float* sums,
                          u64 ahead) {
  switch (code) {
#define TWIN_BLOCKS(name, ...) \
  case Code::name: return dot_block_rows<__VA_ARGS__>(w, rows, cols, x, sums, ahead);
    TWIN_BLOCKS(Q4_0, Blocks32<4, false, 8>)
    TWIN_BLOCKS(Q4_1, Blocks32<4, true, 0>)
    TWIN_BLOCKS(Q5_0, Blocks32<5, false, 16>)
    TWIN_BLOCKS(Q5_1, Blocks32<5, true, 0>)
    TWIN_BLOCKS(Q8_0, Blocks32<8, false, 128>)
    TWIN_BLOCKS(MIXED_32, Blocks32<8, true, 128>)
    TWIN_BLOCKS(Q4_K, BlocksOfSixBits<4>)
    TWIN_BLOCKS(Q5_K, BlocksOfSixBits<5>)
    TWIN_BLOCKS(Q6_K, BlocksOfSixteen<false>)
    TWIN_BLOCKS(MIXED_256, BlocksOfSixteen<true>)
#undef TWIN_BLOCKS
    default: broken("a code in blocks", __FILE__, __LINE__);
  }
}

}  // namespace twin

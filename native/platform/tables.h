// Tables that are compiled in: the generated header has the runs of their words
// (twin/kernel/runs.py), which the compiler expands.
#pragma once

namespace twin {

template <class Row, int ROWS>
struct Table {
  Row at[ROWS];
  __device__ constexpr const Row& operator[](int i) const { return at[i]; }
};

// Neighbouring rows of such a table from one on, as elements of an array.
#define TWIN_ROWS_1(table, i) (table).at[i],
#define TWIN_ROWS_2(table, i) TWIN_ROWS_1(table, i) TWIN_ROWS_1(table, i + 1)
#define TWIN_ROWS_4(table, i) TWIN_ROWS_2(table, i) TWIN_ROWS_2(table, i + 2)
#define TWIN_ROWS_8(table, i) TWIN_ROWS_4(table, i) TWIN_ROWS_4(table, i + 4)
#define TWIN_ROWS_16(table, i) TWIN_ROWS_8(table, i) TWIN_ROWS_8(table, i + 8)
#define TWIN_ROWS_32(table, i) TWIN_ROWS_16(table, i) TWIN_ROWS_16(table, i + 16)
#define TWIN_ROWS_64(table, i) TWIN_ROWS_32(table, i) TWIN_ROWS_32(table, i + 32)
#define TWIN_ROWS_128(table, i) TWIN_ROWS_64(table, i) TWIN_ROWS_64(table, i + 64)
#define TWIN_ROWS_256(table, i) TWIN_ROWS_128(table, i) TWIN_ROWS_128(table, i + 128)
#define TWIN_ROWS_512(table, i) TWIN_ROWS_256(table, i) TWIN_ROWS_256(table, i + 256)
#define TWIN_ROWS_1024(table, i) TWIN_ROWS_512(table, i) TWIN_ROWS_512(table, i + 512)
#define TWIN_ROWS_2048(table, i) TWIN_ROWS_1024(table, i) TWIN_ROWS_1024(table, i + 1024)
#define TWIN_ROWS_4096(table, i) TWIN_ROWS_2048(table, i) TWIN_ROWS_2048(table, i + 2048)

// `count, distance, step`: so many words, each `step` more than the word `distance` before;
// distance 0: so many words follow. A row's FIELDS words are neighbours, or else those of a column
// are. Of SETS sets those of one lie together, in the table those of a block.
template <class Row, int ROWS, int FIELDS, bool BY_ROW, int SETS, class Word, int NUMBERS>
constexpr Table<Row, ROWS> table(const Word (&runs)[NUMBERS]) {
  Word words[ROWS * FIELDS] = {};
  int made = 0;
  for (int i = 0; i < NUMBERS;) {
    const int end = made + int(runs[i]), distance = int(runs[i + 1]);
    const Word* const step = runs + i + 2;
    for (int k = 0; made < end; ++k, ++made)
      words[made] = distance ? words[made - distance] + *step : step[k];
    i += distance ? 3 : 2 + int(runs[i]);
  }
  Table<Row, ROWS> table = {};
  for (int i = 0; i < ROWS; ++i) {
    const int place = i % SETS * (ROWS / SETS) + i / SETS;
    table.at[i] = Row::of(words + place * (BY_ROW ? FIELDS : 1), BY_ROW ? 1 : ROWS);
  }
  return table;
}

}  // namespace twin

// Matrix products in registers, for compiled CPU kernels whose operands need gathering or whose
// results need more than storing.
//
// A block of at most ROWS rows meets a panel of PANEL columns: `products` holds all sums in registers
// while it walks the depth, one broadcast and two products per row and step. Both operands lie as
// they are read, the depth first: a block's rows side by side, and a panel's columns. They may be
// packed for it, [depth][STEP] and [depth][PANEL], or parts of wider matrices. An entry is one running
// sum over the depth, first to last, whatever block and panel it falls into: results do not depend on
// how the work is cut.
#pragma once

#include <algorithm>
#include <array>

#include "cpu_vector.h"

namespace brickwork {
namespace {  // the table in `multiply` would else be one for all libraries of a process

#if defined(__AVX512F__) || defined(__aarch64__)  // 32 vector registers: 28 sums, 2 columns, 1 row
constexpr int ROWS = 14;
#else  // 16 of them
constexpr int ROWS = 6;
#endif

template <class T>
constexpr int PANEL = 2 * lanes<T>;

template <class T>
constexpr int STEP = (ROWS + lanes<T> - 1) / lanes<T> * lanes<T>;

// Rows of a block that is a part of a vector wide, where the rows come in whole vectors.
template <class T>
constexpr int SHARE = lanes<T> > ROWS ? lanes<T> / 2 : lanes<T> > 4 && ROWS < 8 ? 4 : lanes<T>;

// What to bring into the second-level cache beside a product: two lines per step of the depth.
struct Ahead {
  const char *first, *second;
  int64_t step;  // bytes
};

template <class T>
using Sums = Vec<T>[ROWS][2];

// What a product walks through: the first entry, and how far it is from one of the depth to the next.
template <class T>
struct Walk {
  const T* at;
  int64_t step;
};

template <class T, int M>
void products(int64_t depth, Walk<T> block, Walk<T> panel, Sums<T>& to, Ahead ahead) {
  Vec<T> sums[M][2];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) sums[i][0] = sums[i][1] = Vec<T>{};
  for (int64_t k = 0; k < depth; ++k) {
    const Vec<T> left = load(panel.at, 1, lanes<T>), right = load(panel.at + lanes<T>, 1, lanes<T>);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const Vec<T> row = splat(block.at[i]);
      sums[i][0] += row * left;
      sums[i][1] += row * right;
    }
    __builtin_prefetch(ahead.first, 0, 2);
    __builtin_prefetch(ahead.second, 0, 2);
    block.at += block.step;
    panel.at += panel.step;
    ahead.first += ahead.step;
    ahead.second += ahead.step;
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    to[i][0] = sums[i][0];
    to[i][1] = sums[i][1];
  }
}

template <class T>
using Products = void (*)(int64_t, Walk<T>, Walk<T>, Sums<T>&, Ahead);

template <class T, int... M>
constexpr std::array<Products<T>, sizeof...(M)> products_by_rows(std::integer_sequence<int, M...>) {
  return {products<T, M + 1>...};
}

// The sums of `rows` rows, 1 to MOST, by the columns of a panel.
template <class T, int MOST = ROWS>
void multiply(int rows, int64_t depth, Walk<T> block, Walk<T> panel, Sums<T>& to, Ahead ahead) {
  static constexpr auto by_rows = products_by_rows<T>(std::make_integer_sequence<int, MOST>());
  by_rows[rows - 1](depth, block, panel, to, ahead);
}

// Lanes of a and b in turn: those with bit DISTANCE clear stay in `a`, and `b` has the others.
template <class T, int DISTANCE, int... K>
void exchange(Vec<T>& a, Vec<T>& b, std::integer_sequence<int, K...>) {
  constexpr int W = lanes<T>;
  const Vec<T> x = a, y = b;
#if defined(__clang__)
  a = __builtin_shufflevector(x, y, (K & DISTANCE ? W + (K ^ DISTANCE) : K)...);
  b = __builtin_shufflevector(x, y, (K & DISTANCE ? W + K : K ^ DISTANCE)...);
#else
  using Bits = typename Simd<T>::Bits;
  a = __builtin_shuffle(x, y, Bits{(K & DISTANCE ? W + (K ^ DISTANCE) : K)...});
  b = __builtin_shuffle(x, y, Bits{(K & DISTANCE ? W + K : K ^ DISTANCE)...});
#endif
}

// Rows become columns.
template <class T, int DISTANCE = 1>
void transpose(Vec<T> (&square)[lanes<T>]) {
  if constexpr (DISTANCE < lanes<T>) {
#pragma GCC unroll 16
    for (int i = 0; i < lanes<T>; ++i) {
      if (!(i & DISTANCE)) {
        exchange<T, DISTANCE>(square[i], square[i | DISTANCE], std::make_integer_sequence<int, lanes<T>>());
      }
    }
    transpose<T, 2 * DISTANCE>(square);
  }
}

// to[k * step + i] = entry k of row i for `count` rows; what other lanes of their vectors get is not
// to be used.
template <class T, class Row>
void pack_columns(T* to, int64_t step, int count, int64_t depth, const Row& row) {
  constexpr int W = lanes<T>;
  for (int first = 0; first < count; first += W) {
    const T* from[W];
    for (int i = 0; i < W; ++i) from[i] = row(first + i < count ? first + i : first);
    for (int64_t k = 0; k < depth; k += W) {
      Vec<T> square[W];
      T* at = to + k * step + first;
      if (depth - k >= W) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) square[i] = load(from[i] + k, 1, W);
        transpose<T>(square);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store(at + i * step, 1, W, square[i]);
      } else {
        const int steps = int(depth - k);
        for (int i = 0; i < W; ++i) square[i] = load(from[i] + k, 1, steps);
        transpose<T>(square);
        for (int i = 0; i < steps; ++i) store(at + i * step, 1, W, square[i]);
      }
    }
  }
}

// to[k * STRIDE + j] = entry j of row k, of `count` entries or more, zeros after them.
template <class T, int STRIDE, class Row>
void pack_rows(T* to, int64_t count, int64_t depth, const Row& row) {
  constexpr int W = lanes<T>;
  for (int64_t k = 0; k < depth; ++k, to += STRIDE) {
    const T* from = row(k);
    if (count >= STRIDE) {
#pragma GCC unroll 16
      for (int j = 0; j < STRIDE; j += W) store(to + j, 1, W, load(from + j, 1, W));
    } else {
      for (int j = 0; j < STRIDE; ++j) to[j] = j < count ? from[j] : T(0);
    }
  }
}

// `size` up to whole panels.
template <class T>
int64_t whole(int64_t size) {
  return (size + PANEL<T> - 1) / PANEL<T> * PANEL<T>;
}

// Rows in memory, `step` apart, as operands of `product` padded to whole panels.
template <class T>
struct Matrix {
  T* data;
  int64_t step;
  T* operator[](int64_t row) const { return data + row * step; }
};

struct Range {
  int64_t from, to;
};

// out(i, c, sums) for every row i of Xᵀ Y and its columns from c on, a panel at a time. Of the rows
// first ... last only depth(first, last, c) counts; without any the panel is left out.
template <class T, class Depth, class Out>
void product(int64_t rows, int64_t columns, Matrix<T> X, Matrix<T> Y, const Depth& depth, const Out& out) {
  Sums<T> sums;
  const int64_t blocks = (rows + ROWS - 1) / ROWS;
  for (int64_t c = 0; c < columns; c += PANEL<T>) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = rows * block / blocks, last = rows * (block + 1) / blocks;
      const Range at = depth(first, last, c);
      if (at.from >= at.to) continue;
      const Walk<T> x{X[at.from] + first, X.step}, y{Y[at.from] + c, Y.step};
      multiply<T>(int(last - first), at.to - at.from, x, y, sums, {(const char*)x.at, (const char*)y.at, 0});
      for (int64_t i = first; i < last; ++i) out(i, c, sums[i - first]);
    }
  }
}

// `to` becomes the transpose of the first rows and columns of `from`, with zeros to whole panels.
template <class T>
void turn(Matrix<T> to, Matrix<T> from, int64_t rows, int64_t columns) {
  constexpr int W = lanes<T>;
  for (int64_t k = 0; rows % PANEL<T> && k < columns; ++k) {
    std::fill(to[k] + rows / W * W, to[k] + whole<T>(rows), T(0));
  }
  pack_columns<T>(to.data, to.step, int(rows), columns, [&](int64_t i) { return from[i]; });
  for (int64_t k = 0; rows % W && k < columns; ++k) {
    std::fill(to[k] + rows, to[k] + (rows + W - 1) / W * W, T(0));
  }
}

}  // namespace
}  // namespace brickwork

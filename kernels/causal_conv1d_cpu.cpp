// The short causal convolution and its gradient, for causal_conv1d_cpu.py.
//
// A task is a block of tokens and a tile of channels of one batch row; vectors run over channels.
// Tokens are counted in scan order, those passed over not at all; a token knows how many of its taps
// stay within its sequence. Token -1 and those before it are the initial state.
//
// Backward computes a block's results again and keeps the gradients of the last W of them before the
// activation, from which one token's gradient after the other follows; it reads W - 1 tokens of the
// next block too. Blocks write their shares in the gradients of weight and bias, which are added in
// the order of the blocks, whatever the number of threads.
//
// Two convolutions of one x, from the left and from the right, may run as one: a task then does the
// same tokens in both, and dx is the sum, which the second adds while the tokens are in the cache.

#include <algorithm>
#include <vector>

#include "cpu_vector.h"

using namespace brickwork;

// Its twin is `_Conv` in causal_conv1d_cpu.py: the same fields in the same order.
struct Conv {
  int64_t batch, tokens, channels, width, block, tile, threads, silu, reverse;
  int64_t second;  // of two: add to dx instead of setting it
  // Channels are contiguous in x, initial, dy and the results, which are (batch, tokens, channels);
  // initial and dinitial have width - 1 tokens. bias, mask, starts, initial may be absent.
  Array x, weight, bias, mask, starts, initial;
  Array scratch;  // (threads, brickwork_conv_scratch() bytes)
  Array y;
  Array dy;
  Array dx, dinitial;
  Array sums;  // (batch * blocks, width + 1, channels): of weight, the token's own tap first; of bias
};

namespace {

// The tokens of a batch row that are not passed over, in scan order, and the taps each may use.
struct Row {
  std::vector<int64_t> token, taps;
};

std::vector<Row> rows_in_order(const Conv& p) {
  std::vector<Row> rows(p.batch);
  for (int64_t b = 0; b < p.batch; ++b) {
    Row& row = rows[b];
    row.token.reserve(p.tokens);
    row.taps.reserve(p.tokens);
    int64_t taps = p.initial ? p.width - 1 : 0;
    for (int64_t s = 0; s < p.tokens; ++s) {
      const int64_t t = p.reverse ? p.tokens - 1 - s : s;
      if (p.mask && !*p.mask.at<uint8_t>(b, t)) continue;
      taps = p.starts && *p.starts.at<uint8_t>(b, t) ? 1 : std::min(taps + 1, p.width);
      row.token.push_back(t);
      row.taps.push_back(taps);
    }
  }
  return rows;
}

int64_t blocks(const Conv& p) { return (p.tokens + p.block - 1) / p.block; }
int64_t tiles(const Conv& p) { return (p.channels + p.tile - 1) / p.tile; }

template <class T>
class Tile {
 public:
  using V = Vec<T>;
  static constexpr int W = lanes<T>;

  Tile(const Conv& p, const std::vector<Row>& rows, int64_t slot, int64_t task)
      : p(p),
        batch(task / tiles(p) / blocks(p)),
        block(task / tiles(p) % blocks(p)),
        first(task % tiles(p) * p.tile),
        channels(std::min(p.tile, p.channels - first)),
        vectors((channels + W - 1) / W),
        row(rows[batch]),
        count(row.token.size()),
        from(p.second ? std::max<int64_t>(count - (block + 1) * p.block, 0) : block * p.block),
        to(p.second ? count - block * p.block : std::min(from + p.block, count)),
        reads(p.width),
        filters(p.width),
        upstream(p.width) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(p.scratch.at<char>(slot));
    free = reinterpret_cast<V*>((begin + sizeof(V) - 1) / sizeof(V) * sizeof(V));
    filter = take(p.width);
    bias = take(1);
    each([&](int64_t v, int n) {
      const int64_t c = first + v * W;
      bias[v] = p.bias ? load(p.bias.at<T>(c), p.bias.stride[0], n) : V{};
      for (int64_t k = 0; k < p.width; ++k) {
        filter[k * vectors + v] = load(p.weight.at<T>(c, p.width - 1 - k), p.weight.stride[0], n);
      }
    });
  }

  // Bytes that one tile takes from its slot of the scratch, at most.
  static int64_t scratch(const Conv& p) {
    return (((p.tile + W - 1) / W) * (3 * p.width + 2) + 1) * int64_t(sizeof(V));
  }

  void forward() {
    for (int64_t j = from; j < to; ++j) {
      find(j);
      T* y = p.y.at<T>(batch, row.token[j], first);
      each([&](int64_t v, int n) {
        V out = convolve(v, n);
        if (p.silu) out *= logistic<T>(out, exp_minus_magnitude<T>(out));
        store(y + v * W, 1, n, out);
      });
    }
  }

  void backward() {
    V *recent = take(p.width), *sums = take(p.width + 1);
    std::fill(sums, sums + (p.width + 1) * vectors, V{});
    const int64_t lowest = block == 0 && p.initial ? 1 - p.width : from;
    for (int64_t j = from; j < to + p.width - 1; ++j) {
      if (j < count) differentiate(j, recent + j % p.width * vectors, j < to ? sums : nullptr);
      if (j - p.width + 1 >= lowest) collect(j - p.width + 1, recent);
    }
    each([&](int64_t v, int n) {
      for (int64_t k = 0; k <= p.width; ++k) {
        T* sum = p.sums.at<T>(batch * blocks(p) + block, k, first + v * W);
        store(sum, 1, n, sums[k * vectors + v]);
      }
    });
  }

 private:
  const Conv& p;
  const int64_t batch, block, first, channels, vectors;  // channels first ... first + channels
  const Row& row;
  const int64_t count, from, to;  // tokens of the row; of the block: from ... to
  int64_t taps = 0;
  std::vector<const T*> reads;             // what each tap of a token reads
  std::vector<const V*> filters, upstream;
  V *free, *filter, *bias;

  V* take(int64_t rows) {
    free += rows * vectors;
    return free - rows * vectors;
  }

  template <class Body>
  void each(const Body& body) const {
    const int64_t whole = channels / W;
    for (int64_t v = 0; v < whole; ++v) body(v, W);
    if (channels % W) body(whole, int(channels % W));
  }

  void find(int64_t j) {
    taps = row.taps[j];
    for (int64_t k = 0; k < taps; ++k) {
      reads[k] = j >= k ? p.x.at<T>(batch, row.token[j - k], first)
                        : p.initial.at<T>(batch, p.width - 1 + j - k, first);
    }
  }

  V convolve(int64_t v, int n) const {
    V out = bias[v];
    for (int64_t k = 0; k < taps; ++k) {
      out += load(reads[k] + v * W, 1, n) * filter[k * vectors + v];
    }
    return out;
  }

  // The gradient of token j before the activation, and what it adds to the sums, if any are given.
  void differentiate(int64_t j, V* gradient, V* sums) {
    find(j);
    const T* dy = p.dy.at<T>(batch, row.token[j], first);
    each([&](int64_t v, int n) {
      V g = load(dy + v * W, 1, n);
      if (p.silu) {
        const V out = convolve(v, n), open = logistic<T>(out, exp_minus_magnitude<T>(out));
        g *= open * (T(1) + out * (T(1) - open));
      }
      gradient[v] = g;
      if (!sums) return;
      for (int64_t k = 0; k < taps; ++k) sums[k * vectors + v] += g * load(reads[k] + v * W, 1, n);
      sums[p.width * vectors + v] += g;
    });
  }

  // The gradient of the input token i, from those of the results that read it.
  void collect(int64_t i, const V* recent) {
    int64_t found = 0;
    for (int64_t j = std::max<int64_t>(i, 0); j < std::min(i + p.width, count); ++j) {
      if (row.taps[j] <= j - i) break;  // a sequence starts in between
      upstream[found] = recent + j % p.width * vectors;
      filters[found++] = filter + (j - i) * vectors;
    }
    T* dx = i < 0 ? p.dinitial.at<T>(batch, p.width - 1 + i, first)
                  : p.dx.at<T>(batch, row.token[i], first);
    each([&](int64_t v, int n) {
      V total = p.second ? load(dx + v * W, 1, n) : V{};
      for (int64_t k = 0; k < found; ++k) total += upstream[k][v] * filters[k][v];
      store(dx + v * W, 1, n, total);
    });
  }
};

using Rows = std::vector<std::vector<Row>>;

Rows rows_in_order(const Conv* convs, int64_t count) {
  Rows rows;
  for (int64_t i = 0; i < count; ++i) rows.push_back(rows_in_order(convs[i]));
  return rows;
}

template <class T>
void forward(const Conv* convs, int64_t count) {
  const Conv& p = *convs;
  const Rows rows = rows_in_order(convs, count);
  parallel(p.batch * blocks(p) * tiles(p), p.threads, [&](int64_t slot, int64_t task) {
    for (int64_t i = 0; i < count; ++i) Tile<T>(convs[i], rows[i], slot, task).forward();
  });
}

template <class T>
void backward(const Conv* convs, int64_t count) {
  const Conv& p = *convs;
  const Rows rows = rows_in_order(convs, count);
  parallel(p.batch * blocks(p) * tiles(p), p.threads, [&](int64_t slot, int64_t task) {
    for (int64_t i = 0; i < count; ++i) Tile<T>(convs[i], rows[i], slot, task).backward();
  });
  parallel(count * (p.width + 1), p.threads, [&](int64_t, int64_t k) {
    const Array& sums = convs[k / (p.width + 1)].sums;
    T* total = sums.at<T>(0, k % (p.width + 1));
    for (int64_t share = 1; share < p.batch * blocks(p); ++share) {
      const T* more = sums.at<T>(share, k % (p.width + 1));
      for (int64_t c = 0; c < p.channels; ++c) total[c] += more[c];
    }
  });
}

}  // namespace

extern "C" {
int64_t brickwork_conv_scratch(const Conv* conv) {
  return std::max(Tile<float>::scratch(*conv), Tile<double>::scratch(*conv));
}
// `count` convolutions at once, one or two, beside each other in memory.
void brickwork_conv_forward_float32(const Conv* convs, int64_t count) { forward<float>(convs, count); }
void brickwork_conv_forward_float64(const Conv* convs, int64_t count) { forward<double>(convs, count); }
void brickwork_conv_backward_float32(const Conv* convs, int64_t count) { backward<float>(convs, count); }
void brickwork_conv_backward_float64(const Conv* convs, int64_t count) { backward<double>(convs, count); }
}

// The mixture of SwiGLU experts and its gradient, for experts_cpu.py.
//
// Choices are sorted by expert, equal ones by token; a row is a choice in that order. A task is some
// rows of one expert: its products are made while its rows are in cache, and nobody waits for another
// between them. Rows are read and written by pointer, so that gathering is part of packing; gate and
// up lie side by side in a panel, so that the activation follows while both are in registers.
//
// Nothing is added by two threads: rows of a token are added by whoever writes the token, and the
// gradient of a weight by one task over all rows of its expert. No sum depends on how tasks are cut.

#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu_gemm.h"

using namespace brickwork;

// Its twin is `_Mixture` in experts_cpu.py: the same fields in the same order.
struct Mixture {
  int64_t tokens, width, hidden, experts, chosen, threads;
  // The last axis of x, gate_up, down and dy is contiguous; what follows them is wholly contiguous.
  Array x, gate_up, down, indices, weights;  // indices are int64
  Array scratch;                             // (threads, brickwork_experts_scratch() bytes)
  Array rows;                                // (tokens * chosen, width): results, gradients of x
  Array both;                                // (tokens * chosen, 2 hidden): gate and up; may be absent
  Array y;
  Array dy;
  // Room for the gradient of gate and up and the weighted activation, (tokens * chosen) times
  // brickwork_experts_padded() and half that.
  Array dboth, scaled;
  Array dx, dgate_up, ddown, dweights;  // each may be absent
};

namespace {

constexpr int64_t MOST_ROWS = 18 * ROWS;  // of a task: what packing a weight is spread over
constexpr int64_t FEWEST_ROWS = 4 * ROWS;
constexpr int64_t DEPTH = 256;  // rows over which the gradient of a weight is summed in registers
constexpr int64_t MOST_TILES = 64, FEWEST_TILES = 8;  // of a vector's width: its rows in a task

// Rows first ... last of an expert.
struct Part {
  int64_t expert, first, last;
  int64_t rows() const { return last - first; }
};

struct Routing {
  std::vector<int64_t> choice, place, ends;  // of row r; of choice n; where experts' rows end
  bool valid = true;

  explicit Routing(const Mixture& p) {
    const int64_t count = p.tokens * p.chosen;
    std::vector<int64_t> next(p.experts + 1);
    const auto expert = [&](int64_t n) { return *p.indices.at<int64_t>(n / p.chosen, n % p.chosen); };
    for (int64_t n = 0; n < count; ++n) {
      const int64_t e = expert(n);
      if (e < 0 || e >= p.experts) {
        valid = false;
        return;
      }
      ++next[e + 1];
    }
    std::partial_sum(next.begin(), next.end(), next.begin());
    ends.assign(next.begin() + 1, next.end());
    choice.resize(count);
    place.resize(count);
    for (int64_t n = 0; n < count; ++n) choice[place[n] = next[expert(n)]++] = n;
  }

  int64_t begin(int64_t e) const { return e ? ends[e - 1] : 0; }

  // The rows in parts, the longest first, so that no thread is left with one at the end.
  std::vector<Part> parts(const Mixture& p) const {
    const int64_t fair = int64_t(choice.size()) / (4 * std::max<int64_t>(p.threads, 1));
    const int64_t most = std::min(std::max(fair, FEWEST_ROWS), MOST_ROWS);
    std::vector<Part> parts;
    for (int64_t e = 0; e < p.experts; ++e) {
      const int64_t from = begin(e), rows = ends[e] - from, cuts = (rows + most - 1) / most;
      for (int64_t i = 0; i < cuts; ++i) {
        parts.push_back({e, from + rows * i / cuts, from + rows * (i + 1) / cuts});
      }
    }
    std::stable_sort(parts.begin(), parts.end(),
                     [](const Part& a, const Part& b) { return a.rows() > b.rows(); });
    return parts;
  }
};

int64_t padded(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

template <class T>
class Worker {
 public:
  using V = Vec<T>;
  static constexpr int W = lanes<T>;

  Worker(const Mixture& p, const Routing& routing, int64_t slot) : p(p), routing(routing) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(p.scratch.at<char>(slot));
    free = reinterpret_cast<T*>((begin + sizeof(V) - 1) / sizeof(V) * sizeof(V));
  }

  // Bytes that a task takes from its slot of the scratch, at most.
  static int64_t scratch(const Mixture& p) {
    const int64_t blocks = MOST_ROWS / ROWS;
    const int64_t by_rows = blocks * STEP<T> * (p.width + 2 * p.hidden) + MOST_ROWS * W;
    const int64_t panel = std::max(p.width, 2 * p.hidden) * PANEL<T>;
    return (std::max(by_rows + panel, DEPTH * PANEL<T>) + W) * int64_t(sizeof(T));
  }

  void forward(const Part& part) {
    const int64_t C = p.width, F = p.hidden;
    T *x = blocks_of(part, C), *h = blocks_of(part, F), *panel = take(std::max(C, F) * PANEL<T>);
    each_block(part, [&](int64_t block, int64_t first, int rows) {
      pack_columns<T>(x + block * C * STEP<T>, STEP<T>, rows, C,
                      [&](int i) { return p.x.at<T>(token(first + i)); });
    });
    for (int64_t f = 0; f < F; f += W) {
      const int features = int(std::min<int64_t>(W, F - f));
      for (int half = 0; half < 2; ++half) {
        pack_columns<T>(panel + half * W, PANEL<T>, features, C,
                        [&](int j) { return p.gate_up.at<T>(part.expert, half * F + f + j); });
      }
      const bool last = f + W >= F;
      each_block(part, [&](int64_t block, int64_t first, int rows) {
        const Ahead next = block ? nothing(panel)
                           : last ? lines(p.down, part.expert, 0, W)
                                  : lines(p.gate_up, part.expert, f + W, F + f + W);
        multiply<T>(rows, C, {x + block * C * STEP<T>, STEP<T>}, {panel, PANEL<T>}, sums, next);
        for (int i = 0; i < rows; ++i) {
          const V gate = sums[i][0], up = sums[i][1];
          if (p.both) {
            T* kept = p.both.at<T>(first + i, f);
            keep(kept, features, gate);
            keep(kept + F, features, up);
          }
          sums[i][0] = gate * logistic<T>(gate, exp_minus_magnitude<T>(gate)) * up;
        }
        turn(sums, 0, features, h + (block * F + f) * STEP<T>);
      });
    }
    for (int64_t c = 0; c < C; c += PANEL<T>) {
      const int columns = int(std::min<int64_t>(PANEL<T>, C - c));
      pack_columns<T>(panel, PANEL<T>, columns, F,
                      [&](int j) { return p.down.at<T>(part.expert, c + j); });
      each_block(part, [&](int64_t block, int64_t first, int rows) {
        const Ahead next = block || c + PANEL<T> >= C
                               ? nothing(panel)
                               : lines(p.down, part.expert, c + PANEL<T>, c + PANEL<T> + W);
        multiply<T>(rows, F, {h + block * F * STEP<T>, STEP<T>}, {panel, PANEL<T>}, sums, next);
        for (int i = 0; i < rows; ++i) put(p.rows.at<T>(first + i, c), columns, i);
      });
    }
  }

  // Gradients of the rows: of gate and up, of the router's weight, of x.
  void backward(const Part& part) {
    const int64_t C = p.width, F = p.hidden;
    T *dy = blocks_of(part, C), *d = blocks_of(part, 2 * F);
    T* panel = take(std::max(C, 2 * F) * PANEL<T>);
    V* dots = reinterpret_cast<V*>(take(part.rows() * W));
    std::fill(dots, dots + part.rows(), V{});
    each_block(part, [&](int64_t block, int64_t first, int rows) {
      pack_columns<T>(dy + block * C * STEP<T>, STEP<T>, rows, C,
                      [&](int i) { return p.dy.at<T>(token(first + i)); });
    });
    for (int64_t f = 0; f < F; f += PANEL<T>) {
      const int features = int(std::min<int64_t>(PANEL<T>, F - f));
      pack_rows<T, PANEL<T>>(panel, F - f, C, [&](int64_t c) { return p.down.at<T>(part.expert, c, f); });
      const bool last = f + PANEL<T> >= F;
      each_block(part, [&](int64_t block, int64_t first, int rows) {
        const Ahead next = block ? nothing(panel)
                           : last ? columns_of(p.gate_up, part.expert, 0)
                                  : columns_of(p.down, part.expert, f + PANEL<T>);
        for (int i = 0; i < rows; ++i) expect(p.both.at<T>(first + i, f), F);
        multiply<T>(rows, C, {dy + block * C * STEP<T>, STEP<T>}, {panel, PANEL<T>}, sums, next);
        for (int half = 0; half < 2 && half * W < features; ++half) {
          const int count = std::min(W, features - half * W);
          const int64_t at = f + half * W;
          Sums<T> dboth;
          for (int i = 0; i < rows; ++i) {
            const int64_t row = first + i;
            activate_backward(part.expert, row, at, count, sums[i][half], dots[row - part.first], dboth[i]);
          }
          for (int of_up = 0; of_up < 2; ++of_up) {
            turn(dboth, of_up, count, d + (block * 2 * F + of_up * F + at) * STEP<T>);
          }
        }
      });
    }
    if (p.dweights) {
      for (int64_t r = 0; r < part.rows(); ++r) {
        p.dweights.at<T>(0)[routing.choice[part.first + r]] = sum<T>(dots[r]);
      }
    }
    for (int64_t c = 0; p.dx && c < C; c += PANEL<T>) {
      const int columns = int(std::min<int64_t>(PANEL<T>, C - c));
      pack_rows<T, PANEL<T>>(panel, C - c, 2 * F,
                             [&](int64_t k) { return p.gate_up.at<T>(part.expert, k, c); });
      each_block(part, [&](int64_t block, int64_t first, int rows) {
        const Ahead next = block || c + PANEL<T> >= C ? nothing(panel)
                                                      : columns_of(p.gate_up, part.expert, c + PANEL<T>);
        multiply<T>(rows, 2 * F, {d + block * 2 * F * STEP<T>, STEP<T>}, {panel, PANEL<T>}, sums, next);
        for (int i = 0; i < rows; ++i) put(p.rows.at<T>(first + i, c), columns, i);
      });
    }
  }

  // Rows of an expert's gradient of gate_up, as tiles `from` to `to` of those that dboth is kept in:
  // the sum over the expert's rows of dboth times x.
  void weigh_gate_up(int64_t e, int64_t from, int64_t to) {
    const int64_t C = p.width, F = p.hidden, begin = routing.begin(e), end = routing.ends[e];
    T* panel = take(DEPTH * PANEL<T>);
    for (int64_t r = begin; r < end; r += DEPTH) {
      const int64_t depth = std::min(DEPTH, end - r);
      for (int64_t c = 0; c < C; c += PANEL<T>) {
        pack_rows<T, PANEL<T>>(panel, C - c, depth, [&](int64_t k) { return p.x.at<T>(token(r + k), c); });
        for (int64_t tile = from; tile < to; ++tile) {
          const int64_t f = tile % tiles(F) * W, row = tile / tiles(F) * F + f;
          weigh(tile_of(e, tile) + (r - begin) * W, panel, depth, std::min<int64_t>(W, F - f),
                [&](int64_t i) { return p.dgate_up.at<T>(e, row + i, c); }, C - c, r > begin);
        }
      }
    }
  }

  // The same of down, its rows as tiles `from` to `to` of C: dy times the weighted activation.
  void weigh_down(int64_t e, int64_t from, int64_t to) {
    const int64_t C = p.width, F = p.hidden, begin = routing.begin(e), end = routing.ends[e];
    T* tile = take(DEPTH * W);
    for (int64_t r = begin; r < end; r += DEPTH) {
      const int64_t depth = std::min(DEPTH, end - r);
      for (int64_t c = from * W; c < std::min(C, to * W); c += W) {
        pack_rows<T, W>(tile, C - c, depth, [&](int64_t k) { return p.dy.at<T>(token(r + k), c); });
        for (int64_t f = 0; f < F; f += PANEL<T>) {
          weigh(tile, panel_of(e, f) + (r - begin) * PANEL<T>, depth, std::min<int64_t>(W, C - c),
                [&](int64_t i) { return p.ddown.at<T>(e, c + i, f); }, F - f, r > begin);
        }
      }
    }
  }

  // Zeros, as part `i` of `cuts`, for an expert without rows.
  void idle(int64_t e, bool of_both, int64_t i, int64_t cuts) const {
    const int64_t size = (of_both ? 2 : 1) * p.width * p.hidden;
    T* to = (of_both ? p.dgate_up : p.ddown).template at<T>(e);
    std::fill(to + size * i / cuts, to + size * (i + 1) / cuts, T(0));
  }

  static int64_t tiles(int64_t size) { return (size + W - 1) / W; }

 private:
  const Mixture& p;
  const Routing& routing;
  T* free;
  Sums<T> sums;

  int64_t token(int64_t row) const { return routing.choice[row] / p.chosen; }
  T* take(int64_t size) {
    free += size;
    return free - size;
  }
  T* blocks_of(const Part& part, int64_t depth) {
    return take((part.rows() + ROWS - 1) / ROWS * depth * STEP<T>);
  }

  // body(block, its first row, how many): blocks as equal as can be, since a short one is slow.
  template <class Body>
  static void each_block(const Part& part, const Body& body) {
    const int64_t rows = part.rows(), blocks = (rows + ROWS - 1) / ROWS;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t first = rows * i / blocks;
      body(i, part.first + first, int(rows * (i + 1) / blocks - first));
    }
  }

  static Ahead nothing(const T* near) { return {(const char*)near, (const char*)near, 0}; }
  // Where the next panel lies, made of rows from `first` and from `second` on.
  static Ahead lines(const Array& weight, int64_t expert, int64_t first, int64_t second) {
    return {(char*)weight.at<T>(expert, first), (char*)weight.at<T>(expert, second), sizeof(V)};
  }
  // The same, of columns from `column` on.
  static Ahead columns_of(const Array& weight, int64_t expert, int64_t column) {
    return {(char*)weight.at<T>(expert, 0, column), (char*)weight.at<T>(expert, 0, column + W),
            weight.stride[1] * int64_t(sizeof(T))};
  }

  // The half `side` of `from` as part of a block: to[j * STEP + i] = from[i][side][j].
  static void turn(const Sums<T>& from, int side, int count, T* to) {
    for (int first = 0; first < STEP<T>; first += W) {
      V square[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) square[i] = from[std::min(first + i, ROWS - 1)][side];
      transpose<T>(square);
      for (int j = 0; j < count; ++j) store(to + j * STEP<T> + first, 1, W, square[j]);
    }
  }

  // The tiles that dboth, of one expert, is kept in, [tile][row][W], those of the gate first, and the
  // panels of the weighted activation, [panel][row][PANEL]: as the gradients of the weights read them.
  T* tile_of(int64_t e, int64_t tile) const {
    const int64_t begin = routing.begin(e), rows = routing.ends[e] - begin;
    return p.dboth.at<T>(0) + (begin * 2 * tiles(p.hidden) + tile * rows) * W;
  }
  T* panel_of(int64_t e, int64_t f) const {
    const int64_t begin = routing.begin(e), rows = routing.ends[e] - begin;
    return p.scaled.at<T>(0) + begin * padded(p.hidden, PANEL<T>) + f * rows;
  }

  // A tile by a panel, into rows that to(i) points at.
  template <class To>
  void weigh(const T* tile, const T* panel, int64_t depth, int64_t rows, const To& to, int64_t columns,
             bool add) {
    constexpr int M = SHARE<T>;
    for (int64_t i = 0; i < rows; i += M) {
      const int count = int(std::min<int64_t>(M, rows - i));
      multiply<T, M>(count, depth, {tile + i, W}, {panel, PANEL<T>}, sums, nothing(tile));
      for (int j = 0; j < count; ++j) put(to(i + j), columns, j, add ? How::add : How::stream);
    }
  }

  // Gate and up of a row, which are read after the next product.
  static void expect(const T* gate, int64_t up) {
    for (int half = 0; half < 2; ++half) {
      __builtin_prefetch(gate + half * W, 0, 2);
      __builtin_prefetch(gate + up + half * W, 0, 2);
    }
  }

  // Row i of the sums, in place of what was there or added to it, or to where none reads it soon.
  enum class How { store, add, stream };
  void put(T* to, int64_t columns, int i, How how = How::store) const {
    for (int half = 0; half < 2 && half * W < columns; ++half) {
      const int count = int(std::min<int64_t>(W, columns - half * W));
      T* at = to + half * W;
      const V value = sums[i][half];
      if (how == How::stream) {
        keep(at, count, value);
      } else {
        store(at, 1, count, how == How::add ? load<T>(at, 1, count) + value : value);
      }
    }
  }
  static void keep(T* to, int count, V value) {
    if (count == W) return stream(to, value);
    store(to, 1, count, value);
  }

  // From the gradient of the unweighted activation: those of gate and up, weighted, and its share in
  // the gradient of the weight.
  void activate_backward(int64_t e, int64_t row, int64_t f, int count, V grad, V& dot, V (&to)[2]) const {
    const T *kept = p.both.at<T>(row, f), weight = p.weights.at<T>(0)[routing.choice[row]];
    const V gate = load(kept, 1, count), up = load(kept + p.hidden, 1, count);
    const V open = logistic<T>(gate, exp_minus_magnitude<T>(gate)), silu = gate * open;
    dot += grad * silu * up;
    grad *= weight;
    to[0] = grad * up * open * (T(1) + gate * (T(1) - open));
    to[1] = grad * silu;
    const int64_t r = row - routing.begin(e);
    if (p.dgate_up) {
      for (int of_up = 0; of_up < 2; ++of_up) {
        store(tile_of(e, of_up * tiles(p.hidden) + f / W) + r * W, 1, W, to[of_up]);
      }
    }
    if (p.ddown) {
      const int64_t column = f % PANEL<T>;
      store(panel_of(e, f - column) + r * PANEL<T> + column, 1, W, silu * up * weight);
    }
  }
};

// Each token's sum over its rows, weighted if there are weights.
template <class T>
void combine(const Mixture& p, const Routing& routing, const Array& to, const T* weights) {
  constexpr int W = lanes<T>;
  constexpr int64_t tokens = 16;
  parallel((p.tokens + tokens - 1) / tokens, p.threads, [&](int64_t, int64_t task) {
    for (int64_t s = task * tokens; s < std::min(p.tokens, (task + 1) * tokens); ++s) {
      const int64_t* place = routing.place.data() + s * p.chosen;
      for (int64_t c = 0; c < p.width; c += W) {
        const int count = int(std::min<int64_t>(W, p.width - c));
        Vec<T> total{};
        for (int64_t k = 0; k < p.chosen; ++k) {
          const Vec<T> row = load(p.rows.at<T>(place[k], c), 1, count);
          total += weights ? row * weights[s * p.chosen + k] : row;
        }
        store(to.at<T>(s, c), 1, count, total);
      }
    }
  });
}

// Both return whether every index is one of an expert.
template <class T>
bool forward(const Mixture& p) {
  const Routing routing(p);
  if (!routing.valid) return false;
  const std::vector<Part> parts = routing.parts(p);
  parallel(parts.size(), p.threads,
           [&](int64_t slot, int64_t task) { Worker<T>(p, routing, slot).forward(parts[task]); });
  combine<T>(p, routing, p.y, p.weights.at<T>(0));
  return true;
}

template <class T>
bool backward(const Mixture& p) {
  const Routing routing(p);
  if (!routing.valid) return false;
  const std::vector<Part> parts = routing.parts(p);
  parallel(parts.size(), p.threads,
           [&](int64_t slot, int64_t task) { Worker<T>(p, routing, slot).backward(parts[task]); });
  if (p.dx) combine<T>(p, routing, p.dx, nullptr);
  const int64_t tiles = 2 * Worker<T>::tiles(p.hidden), tiles_of_down = Worker<T>::tiles(p.width);
  const int64_t fair = p.experts * (tiles + tiles_of_down) / (8 * std::max<int64_t>(p.threads, 1));
  const int64_t most = std::min(std::max(fair, FEWEST_TILES), MOST_TILES);
  const auto cuts = [&](int64_t tiles) { return (tiles + most - 1) / most; };
  const int64_t of_both = p.dgate_up ? cuts(tiles) : 0, of_down = p.ddown ? cuts(tiles_of_down) : 0;
  const int64_t each = of_both + of_down;
  parallel(p.experts * each, p.threads, [&](int64_t slot, int64_t task) {
    Worker<T> worker(p, routing, slot);
    const int64_t e = task / each, i = task % each, j = i - of_both;
    if (routing.begin(e) == routing.ends[e]) {
      worker.idle(e, i < of_both, i < of_both ? i : j, i < of_both ? of_both : of_down);
    } else if (i < of_both) {
      worker.weigh_gate_up(e, tiles * i / of_both, tiles * (i + 1) / of_both);
    } else {
      worker.weigh_down(e, tiles_of_down * j / of_down, tiles_of_down * (j + 1) / of_down);
    }
  });
  return true;
}

}  // namespace

extern "C" {
int64_t brickwork_experts_scratch(const Mixture* p) {
  return std::max(Worker<float>::scratch(*p), Worker<double>::scratch(*p));
}
// What 2 hidden grows to where rows are kept in whole panels.
int64_t brickwork_experts_padded(const Mixture* p) { return 2 * padded(p->hidden, PANEL<float>); }
bool brickwork_experts_forward_float32(const Mixture* p) { return forward<float>(*p); }
bool brickwork_experts_forward_float64(const Mixture* p) { return forward<double>(*p); }
bool brickwork_experts_backward_float32(const Mixture* p) { return backward<float>(*p); }
bool brickwork_experts_backward_float64(const Mixture* p) { return backward<double>(*p); }
}

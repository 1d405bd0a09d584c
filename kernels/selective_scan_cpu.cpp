// The selective scan of Mamba-1 and its gradient, for selective_scan_cpu.py.
//
// A task is a tile of channels of one batch row; vectors run over channels, so that B and C are
// broadcast and no sum crosses a vector. It walks the tokens in chunks: inputs of a chunk are staged
// in scratch as [vector of channels][step], then for a few states at a time ("block") the recurrence
// runs with the states in registers. Steps count in scan order, tokens from the left.
//
// Backward goes through the chunks from the last. From the state kept at a chunk's start it computes
// decays and states of a block again, then walks back. Gradients of B and C sum over
// channels: each tile writes its share of the chunk, and the shares are added in the order of the
// tiles, whatever the number of threads.
//
// Two scans of the same sizes, one in each direction, may run as one: a task then does its tile in
// both, and y and dz are the sums, which the second adds while the tile's share is in the cache.

#include <algorithm>

#include "cpu_vector.h"

using namespace brickwork;

namespace {

constexpr int BLOCK = 4;       // states in registers at a time
constexpr int AHEAD = 8;       // steps from fetching a row to using it
constexpr int SHARE_ROWS = 8;  // steps whose shares one task adds up

}  // namespace

// Its twin is `_Scan` in selective_scan_cpu.py: the same fields in the same order.
struct Scan {
  int64_t batch, tokens, channels, groups, state, chunk, tile, threads, softplus, reverse;
  int64_t part;  // 0: alone; 1 or 2: the first or second of two, whose y and dz are sums
  // Inputs. mask and starts are bytes; any of D, z, delta_bias, mask, starts, initial may be absent.
  Array x, delta, A, B, C, D, z, delta_bias, mask, starts, initial;
  Array y, final_state;  // results of forward
  Array states;          // (batch, chunks, state, channels): at the start of every chunk
  Array scratch;         // (threads, brickwork_scan_scratch() bytes)
  Array dy;
  Array dx, ddelta, dB, dC, dz;  // results of backward
  Array dstate;                  // (batch, state, channels), in and out
  Array sums;    // (batch, state + 2, channels), zeros at first: gradients of A, of D, of delta_bias
  Array shares;  // (2, tasks, blocks, chunk, BLOCK), the last two as one
};

namespace {

template <class T>
constexpr T LOG2E = T(1.4426950408889634074);
template <class T>
constexpr T LN2 = T(0.69314718055994530942);

// The vectors of one (batch, tokens, channels) array that a tile meets in one chunk, by step.
template <class T>
struct Rows {
  T* origin = nullptr;
  int64_t step = 0, lane = 0;
  int count = 0;
  Vec<T> operator[](int64_t s) const { return load(origin + s * step, lane, count); }
  void set(int64_t s, Vec<T> value) const { store(origin + s * step, lane, count, value); }
  // Into the second-level cache: rows a power of two apart would push each other out of the first.
  void fetch(int64_t s) const { __builtin_prefetch(origin + s * step, 0, 2); }
  void fetch_to_set(int64_t s) const { __builtin_prefetch(origin + s * step, 1, 2); }
};

template <class T>
class Tile {
 public:
  using V = Vec<T>;
  static constexpr int W = lanes<T>;

  Tile(const Scan& p, int64_t slot, int64_t task)
      : p(p), task(task), padded((p.state + BLOCK - 1) / BLOCK * BLOCK), row(p.chunk + 1) {
    const int64_t per_group = p.channels / p.groups, tiles = tiles_per_group(p);
    batch = task / tiles / p.groups;
    group = task / tiles % p.groups;
    first = group * per_group + task % tiles * p.tile;
    width = std::min(p.tile, per_group - task % tiles * p.tile);
    vectors = (width + W - 1) / W;
    uintptr_t begin = reinterpret_cast<uintptr_t>(p.scratch.at<char>(slot));
    free = reinterpret_cast<V*>((begin + sizeof(V) - 1) / sizeof(V) * sizeof(V));
    rate = take(vectors * padded);
    B = reinterpret_cast<T*>(take(p.chunk * padded / W + 1));
    C = reinterpret_cast<T*>(take(p.chunk * padded / W + 1));
    d = take(vectors * row);
    u = take(vectors * row);
    longest = take(vectors);
    for (int64_t v = 0; v < vectors; ++v) {
      for (int64_t n = 0; n < padded; ++n) {
        V a{};
        if (n < p.state) a = load(p.A.at<T>(first + v * W, n), p.A.stride[0], count(v)) * LOG2E<T>;
        rate[v * padded + n] = a;
      }
    }
  }

  static int64_t tiles_per_group(const Scan& p) {
    return (p.channels / p.groups + p.tile - 1) / p.tile;
  }
  // Bytes that one tile takes from its slot of the scratch, at most.
  static int64_t scratch(const Scan& p) {
    const int64_t padded = (p.state + BLOCK - 1) / BLOCK * BLOCK, vectors = (p.tile + W - 1) / W;
    const int64_t row = p.chunk + 1, rows_of_B = p.chunk * padded / W + 1;
    const int64_t held = vectors * (2 * padded + 9 * row + 1) + 2 * rows_of_B + 4 * row * BLOCK;
    return (held + 1) * int64_t(sizeof(V));
  }
  static int64_t tasks(const Scan& p) { return p.batch * p.groups * tiles_per_group(p); }

  void forward() {
    V* h = take(vectors * padded);
    V* y = take(vectors * row);
    for (int64_t v = 0; v < vectors; ++v) {
      for (int64_t n = 0; n < padded; ++n) {
        V start{};
        if (p.initial && n < p.state) {
          start = load(p.initial.at<T>(batch, first + v * W, n), p.initial.stride[1], count(v));
        }
        h[v * padded + n] = start;
      }
    }
    for (int64_t chunk = 0; chunk * p.chunk < p.tokens; ++chunk) {
      enter(chunk);
      for (int64_t v = 0; v < vectors; ++v) {
        if (p.states) {
          for (int64_t n = 0; n < p.state; ++n) {
            T* to = p.states.at<T>(batch, chunk, n, first + v * W);
            store(to, 1, count(v), h[v * padded + n]);
          }
        }
        V* y_v = y + v * row;
        const V D = skip(v);
        stage(v, [&](int64_t s, V x, V) { y_v[s] = x * D; });
        soon[0] = rows(p.z, v);
        soon[1] = rows(p.y, v);
        expect(v, p.x, 2);
        expect(v, p.delta, 3);
        for (int64_t n = 0; n < padded; n += BLOCK) {
          walk<false>(v, n, h + v * padded + n, y, nullptr, nullptr);
        }
        const Rows<T> results = rows(p.y, v), gates = rows(p.z, v);
        for (int64_t s = 0; s < steps; ++s) {
          V result = y_v[s];
          if (!real(s)) {
            result = V{};
          } else if (gates.origin) {
            const V z = gates[s];
            result *= z * logistic<T>(z, exp_minus_magnitude<T>(z));
          }
          results.set(s, p.part == 2 ? results[s] + result : result);
        }
      }
    }
    for (int64_t v = 0; v < vectors; ++v) {
      for (int64_t n = 0; n < p.state; ++n) {
        T* to = p.final_state.at<T>(batch, first + v * W, n);
        store(to, p.final_state.stride[1], count(v), h[v * padded + n]);
      }
    }
  }

  void backward(int64_t chunk) {
    V *x = take(vectors * row), *slope = take(vectors * row);
    V *g = take(vectors * row), *dz = take(vectors * row), *y = take(vectors * row);
    V *du = take(vectors * row), *dd = take(vectors * row);
    V *decays = take(row * BLOCK), *states = take(row * BLOCK);
    V *dB = take(row * BLOCK), *dC = take(row * BLOCK);
    enter(chunk);
    for (int64_t v = 0; v < vectors; ++v) {
      const Rows<T> dy = rows(p.dy, v), gates = rows(p.z, v);
      const V D = skip(v);
      int64_t i = v * row;
      stage(v, [&](int64_t s, V value, V rise) {
        V through{}, around{};
        dy.fetch(s + AHEAD);
        gates.fetch(s + AHEAD);
        if (dy.origin && real(s)) {
          through = dy[s];
          if (gates.origin) {
            const V z = gates[s], open = logistic<T>(z, exp_minus_magnitude<T>(z));
            around = through * open * (T(1) + z * (T(1) - open));
            through *= z * open;
          }
        }
        x[i] = value;
        slope[i] = rise;
        y[i] = value * D;
        g[i] = through;
        dz[i] = around;
        du[i] = dd[i] = V{};
        ++i;
      });
    }
    for (int64_t n = 0; n < padded; n += BLOCK) {
      const int64_t entries = (steps * BLOCK + W - 1) / W * W;  // chunks have whole vectors of them
      std::fill(dB, dB + entries, V{});
      std::fill(dC, dC + entries, V{});
      for (int64_t v = 0; v < vectors; ++v) {
        V state[BLOCK]{};
        for (int k = 0; k < BLOCK && n + k < p.state; ++k) {
          state[k] = load(p.states.at<T>(batch, chunk, n + k, first + v * W), 1, count(v));
        }
        walk<true>(v, n, state, y, decays, states);
        if (p.starts) {
          retreat<true>(v, n, decays, states, g, du, dd, dB, dC);
        } else {
          retreat<false>(v, n, decays, states, g, du, dd, dB, dC);
        }
      }
      T *share_B = p.shares.at<T>(0, task, n / BLOCK), *share_C = p.shares.at<T>(1, task, n / BLOCK);
      for (int64_t i = 0; i < entries; i += W) {
        store(share_B + i, 1, W, brickwork::sums<T>(dB + i));
        store(share_C + i, 1, W, brickwork::sums<T>(dC + i));
      }
    }
    for (int64_t v = 0; v < vectors; ++v) {
      const Rows<T> dx_v = rows(p.dx, v), ddelta_v = rows(p.ddelta, v), dz_v = rows(p.dz, v);
      const V D = skip(v);
      // Steps below it are at tokens where the other of two, who goes the other way, has been.
      const int64_t met = p.part ? p.tokens - 2 * begin - (p.part == 1 ? p.chunk : 0) : 0;
      V dD{}, dbias{};
      for (int64_t s = 0; s < steps; ++s) {
        const int64_t i = v * row + s;
        dx_v.fetch_to_set(s + AHEAD);
        ddelta_v.fetch_to_set(s + AHEAD);
        dz_v.fetch_to_set(s + AHEAD);
        V dx = du[i] * d[i] + g[i] * D;
        V ddelta = (dd[i] * LN2<T> + du[i] * x[i]) * slope[i];
        V dgate = dz[i] * y[i];
        if (!real(s)) dx = ddelta = dgate = V{};
        dx_v.set(s, dx);
        ddelta_v.set(s, ddelta);
        if (dz_v.origin) dz_v.set(s, s < met ? dz_v[s] + dgate : dgate);
        dD += g[i] * x[i];
        dbias += ddelta;
      }
      add(p.sums.at<T>(batch, p.state, first + v * W), v, dD);
      add(p.sums.at<T>(batch, p.state + 1, first + v * W), v, dbias);
    }
  }

 private:
  const Scan& p;
  // padded: states up to a whole block. row: a vector's steps in scratch, one more than a chunk has,
  // so that the arrays do not meet in one set of the cache.
  const int64_t task, padded, row;
  int64_t batch, group, first, width, vectors;  // the tile: channels first ... first + width
  int64_t begin = 0, steps = 0;                 // the chunk: steps begin ... begin + steps
  V *free, *rate, *d, *u, *longest;             // A log2(e); step sizes, times x, the largest
  const uint8_t* mask = nullptr;                // of the chunk's first step
  int64_t mask_step = 0;
  Rows<T> soon[4];                              // what is fetched while the first block is computed
  T *B, *C;                                     // [step][state]

  V* take(int64_t size) {
    free += size;
    return free - size;
  }
  int count(int64_t v) const { return int(std::min<int64_t>(W, width - v * W)); }
  int64_t token(int64_t s) const { return p.reverse ? p.tokens - 1 - begin - s : begin + s; }
  bool real(int64_t s) const { return !mask || mask[s * mask_step]; }
  bool starts(int64_t s) const { return p.starts && *p.starts.at<uint8_t>(batch, token(s)); }
  V skip(int64_t v) const {
    return p.D ? load(p.D.at<T>(first + v * W), p.D.stride[0], count(v)) : V{};
  }
  Rows<T> rows(const Array& a, int64_t v) const {
    if (!a) return {};
    const int64_t step = p.reverse ? -a.stride[1] : a.stride[1];
    return {a.at<T>(batch, token(0), first + v * W), step, a.stride[2], count(v)};
  }
  // Rows to fetch while the vector v is computed: of the next vector, or of the next chunk's first.
  void expect(int64_t v, const Array& a, int k) {
    soon[k] = rows(a, (v + 1) % vectors);
    if (v + 1 == vectors) soon[k].origin += steps * soon[k].step;
  }
  void add(T* to, int64_t v, V value) const {
    store(to, 1, count(v), load<T>(to, 1, count(v)) + value);
  }

  // Begin a chunk: the rows of B and C, zeros at masked steps whatever is there.
  void enter(int64_t chunk) {
    begin = chunk * p.chunk;
    steps = std::min(p.chunk, p.tokens - begin);
    mask = p.mask ? p.mask.at<uint8_t>(batch, token(0)) : nullptr;
    mask_step = p.reverse ? -p.mask.stride[1] : p.mask.stride[1];
    std::fill(B, B + steps * padded, T(0));
    std::fill(C, C + steps * padded, T(0));
    for (int64_t s = 0; s < steps; ++s) {
      if (!real(s)) continue;
      const T* row_B = p.B.at<T>(batch, token(s), group);
      const T* row_C = p.C.at<T>(batch, token(s), group);
      for (int64_t n = 0; n < p.state; ++n) {
        B[s * padded + n] = row_B[n * p.B.stride[3]];
        C[s * padded + n] = row_C[n * p.C.stride[3]];
      }
    }
  }

  // Step sizes and pushes of the vector v; each(step, x, slope of the step size) sees the rest.
  template <class Each>
  void stage(int64_t v, const Each& each) {
    const V bias = p.delta_bias ? load(p.delta_bias.at<T>(first + v * W), p.delta_bias.stride[0], count(v))
                                : V{};
    V most{};
    const Rows<T> xs = rows(p.x, v), sizes = rows(p.delta, v);
    V *d_v = d + v * row, *u_v = u + v * row;
    const bool soft = p.softplus;
    for (int64_t s = 0; s < steps; ++s) {
      V x{}, size{}, slope{};
      xs.fetch(s + AHEAD);
      sizes.fetch(s + AHEAD);
      if (real(s)) {
        x = xs[s];
        size = sizes[s] + bias;
        slope = splat(T(1));
        if (soft) {
          const V e = exp_minus_magnitude<T>(size);
          slope = logistic<T>(size, e);
          size = softplus<T>(size, e);
        }
      }
      d_v[s] = size;
      u_v[s] = size * x;
      most = magnitude<T>(size) > most ? magnitude<T>(size) : most;
      each(s, x, slope);
    }
    longest[v] = most;
  }

  // Whether every exponent of the block, in this chunk, is one that exp2_small takes. A step of NaN
  // need not be one of them: its push makes the state NaN whatever the decay is.
  bool small(int64_t v, int64_t n) const {
    V fastest{}, poison{};
    for (int k = 0; k < BLOCK; ++k) {
      const V a = rate[v * padded + n + k];
      fastest = magnitude<T>(a) > fastest ? magnitude<T>(a) : fastest;
      poison += a * T(0);
    }
    const auto fits = (fastest + poison) * longest[v] <= T(Simd<T>::small);
    for (int k = 0; k < W; ++k) {
      if (!fits[k]) return false;
    }
    return true;
  }

  // Steps from `from` on to the next start of a sequence.
  int64_t run_end(int64_t from) const {
    if (!p.starts) return steps;
    do ++from;
    while (from < steps && !starts(from));
    return from;
  }

  // Run a block through the chunk and add C h to y; if asked each decay is noted in [step][k], and
  // each state one row further, behind the one before the chunk.
  template <bool SMALL, bool NOTE>
  void advance(int64_t v, int64_t n, V* state, V* y_all, V* decays, V* states) const {
    const V *d_v = d + v * row, *u_v = u + v * row;
    V* y = y_all + v * row;
    V h[BLOCK], a[BLOCK];
    for (int k = 0; k < BLOCK; ++k) {
      h[k] = state[k];
      a[k] = rate[v * padded + n + k];
      if constexpr (NOTE) states[k] = h[k];
    }
    for (int64_t from = 0, to; from < steps; from = to) {
      to = run_end(from);
      if (starts(from)) std::fill(h, h + BLOCK, V{});
      for (int64_t s = from; s < to; ++s) {
        const T *b = B + s * padded + n, *c = C + s * padded + n;
        const V size = d_v[s], push = u_v[s];
        V total = y[s];
        if (!NOTE && n == 0) {
          for (const Rows<T>& next : soon) next.fetch(s);
        }
        for (int k = 0; k < BLOCK; ++k) {
          const V decay = SMALL ? exp2_small<T>(size * a[k]) : exp2_any<T>(size * a[k]);
          h[k] = decay * h[k] + push * b[k];
          total += h[k] * c[k];
          if constexpr (NOTE) {
            decays[s * BLOCK + k] = decay;
            states[(s + 1) * BLOCK + k] = h[k];
          }
        }
        y[s] = total;
      }
    }
    std::copy(h, h + BLOCK, state);
  }

  template <bool NOTE>
  void walk(int64_t v, int64_t n, V* state, V* y, V* decays, V* states) const {
    if (small(v, n)) {
      advance<true, NOTE>(v, n, state, y, decays, states);
    } else {
      advance<false, NOTE>(v, n, state, y, decays, states);
    }
  }

  // The way back. The gradient of a decay is dh a h' / a, with h' the state before the step, and
  // dh a is what goes on to that state.
  template <bool STARTS>
  void retreat(int64_t v, int64_t n, const V* decays, const V* states, const V* g_all, V* du_all,
               V* dd_all, V* dB, V* dC) const {
    const V *d_v = d + v * row, *u_v = u + v * row, *g = g_all + v * row;
    V *du = du_all + v * row, *dd = dd_all + v * row;
    V dh[BLOCK], dA[BLOCK], a[BLOCK], h[BLOCK];
    for (int k = 0; k < BLOCK; ++k) {
      const bool kept = n + k < p.state;
      dh[k] = kept ? load(p.dstate.at<T>(batch, n + k, first + v * W), 1, count(v)) : V{};
      dA[k] = V{};
      a[k] = rate[v * padded + n + k];
      h[k] = states[steps * BLOCK + k];
    }
    for (int64_t s = steps - 1; s >= 0; --s) {
      const T *b = B + s * padded + n, *c = C + s * padded + n;
      const V size = d_v[s], push = u_v[s], gs = g[s];
      const bool start = STARTS && starts(s);
      V du_s = du[s], dd_s = dd[s];
      for (int k = 0; k < BLOCK; ++k) {
        const V dh_s = dh[k] + gs * c[k];
        dC[s * BLOCK + k] += gs * h[k];
        dB[s * BLOCK + k] += dh_s * push;
        du_s += dh_s * b[k];
        dh[k] = dh_s * decays[s * BLOCK + k];
        h[k] = states[s * BLOCK + k];
        V dlog = dh[k] * h[k];
        if (start) dh[k] = dlog = V{};  // whatever the sequence before it left
        dd_s += dlog * a[k];
        dA[k] += dlog * size;
      }
      du[s] = du_s;
      dd[s] = dd_s;
    }
    for (int k = 0; k < BLOCK && n + k < p.state; ++k) {
      store(p.dstate.at<T>(batch, n + k, first + v * W), 1, count(v), dh[k]);
      add(p.sums.at<T>(batch, n + k, first + v * W), v, dA[k]);
    }
  }
};

// Gradients of B and C of one chunk, from the shares of the tiles.
template <class T>
void gather_shares(const Scan& p, int64_t chunk, int64_t part, int64_t parts) {
  const int64_t tiles = Tile<T>::tiles_per_group(p);
  const int64_t begin = chunk * p.chunk, steps = std::min(p.chunk, p.tokens - begin);
  const int64_t owner = part / parts, batch = owner / p.groups, group = owner % p.groups;
  const int64_t last = std::min(steps, (part % parts + 1) * SHARE_ROWS);
  for (int64_t s = part % parts * SHARE_ROWS; s < last; ++s) {
    const int64_t token = p.reverse ? p.tokens - 1 - begin - s : begin + s;
    T *dB = p.dB.at<T>(batch, token, group), *dC = p.dC.at<T>(batch, token, group);
    if (p.mask && !*p.mask.at<uint8_t>(batch, token)) {
      std::fill(dB, dB + p.state, T(0));
      std::fill(dC, dC + p.state, T(0));
      continue;
    }
    for (int64_t n = 0; n < p.state; n += BLOCK) {
      T total_B[BLOCK]{}, total_C[BLOCK]{};
      for (int64_t tile = owner * tiles; tile < (owner + 1) * tiles; ++tile) {
        const T* share_B = p.shares.at<T>(0, tile, n / BLOCK, s * BLOCK);
        const T* share_C = p.shares.at<T>(1, tile, n / BLOCK, s * BLOCK);
        for (int k = 0; k < BLOCK; ++k) total_B[k] += share_B[k];
        for (int k = 0; k < BLOCK; ++k) total_C[k] += share_C[k];
      }
      const int64_t count = std::min<int64_t>(BLOCK, p.state - n);
      std::copy(total_B, total_B + count, dB + n);
      std::copy(total_C, total_C + count, dC + n);
    }
  }
}

template <class T>
void forward(const Scan* scans, int64_t count) {
  parallel(Tile<T>::tasks(*scans), scans->threads, [&](int64_t slot, int64_t task) {
    for (int64_t i = 0; i < count; ++i) Tile<T>(scans[i], slot, task).forward();
  });
}

template <class T>
void backward(const Scan* scans, int64_t count) {
  const Scan& p = *scans;
  const int64_t tasks = Tile<T>::tasks(p);
  for (int64_t chunk = (p.tokens + p.chunk - 1) / p.chunk - 1; chunk >= 0; --chunk) {
    parallel(tasks, p.threads, [&](int64_t slot, int64_t task) {
      for (int64_t i = 0; i < count; ++i) Tile<T>(scans[i], slot, task).backward(chunk);
    });
    const int64_t steps = std::min(p.chunk, p.tokens - chunk * p.chunk);
    const int64_t parts = (steps + SHARE_ROWS - 1) / SHARE_ROWS, each = p.batch * p.groups * parts;
    parallel(count * each, p.threads, [&](int64_t, int64_t part) {
      gather_shares<T>(scans[part / each], chunk, part % each, parts);
    });
  }
}

}  // namespace

extern "C" {
int64_t brickwork_scan_scratch(const Scan* scan) {
  return std::max(Tile<float>::scratch(*scan), Tile<double>::scratch(*scan));
}
// `count` scans of the same sizes at once, one or two, beside each other in memory.
void brickwork_scan_forward_float32(const Scan* scans, int64_t count) { forward<float>(scans, count); }
void brickwork_scan_forward_float64(const Scan* scans, int64_t count) { forward<double>(scans, count); }
void brickwork_scan_backward_float32(const Scan* scans, int64_t count) { backward<float>(scans, count); }
void brickwork_scan_backward_float64(const Scan* scans, int64_t count) { backward<double>(scans, count); }
}

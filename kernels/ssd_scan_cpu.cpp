// The scan of Mamba-2 and its gradient, for ssd_scan_cpu.py.
//
// A task is a tile of heads of one group and batch row. It walks the tokens in chunks, which are
// matrix products: within a chunk by the decays between its steps, of which only the half that is not
// 0 is computed, and with the state before it. Operands are staged in scratch, in scan order (steps
// count in it, tokens from the left) and padded with zeros to whole panels; what heads share, C Bᵀ
// and the transposes of B and C, is made once per tile. Every product is Xᵀ Y of two such matrices,
// the depth first, and what follows it happens to the sums in registers.
//
// Where a sequence starts within a chunk, the chunk is done in parts: no number of one sequence meets
// one of another, be it NaN.
//
// Backward goes through the chunks from the last, with the states kept in front of them. Gradients of
// B and C sum over heads: each tile writes its share of the chunk, and the shares are added in the
// order of the tiles, whatever the number of threads.

#include <algorithm>

#include "cpu_gemm.h"

using namespace brickwork;

// Its twin is `_Scan` in ssd_scan_cpu.py: the same fields in the same order.
struct Scan {
  int64_t batch, tokens, heads, width, groups, state, chunk, tile, threads, softplus, reverse;
  // Inputs. mask and starts are bytes; any of D (heads, width), z, delta_bias, mask, starts and initial,
  // whose last axis is contiguous, may be absent.
  Array x, delta, A, B, C, D, z, delta_bias, mask, starts, initial;
  Array y, final_state;  // results of forward
  Array states;          // (batch, heads, chunks * state, width): at the start of every chunk
  Array scratch;         // (threads, brickwork_ssd_scratch() bytes)
  Array dy;
  Array dx, ddelta, dB, dC, dz;  // results of backward
  Array dstate;                  // (batch, heads, state, width), in and out
  Array sums;  // doubles (batch, heads, width + 2), zeros at first: gradients of D, A and delta_bias
  Array shares;  // (2, tasks, chunk, state)
};

namespace {

constexpr int64_t SHARE_ROWS = 8;  // steps whose shares one task adds up
constexpr float LARGE = 1e30f;  // of an exponent: 2 to the minus it is 0
template <class T>
constexpr T LOG2E = T(1.4426950408889634074);

template <class T>
class Tile {
 public:
  using V = Vec<T>;
  static constexpr int W = lanes<T>;

  // Without memory it only counts what it would take.
  Tile(const Scan& p, char* memory, int64_t task) : p(p), task(task) {
    const int64_t per_group = p.heads / p.groups, tiles = tiles_per_group(p);
    batch = task / tiles / p.groups;
    group = task / tiles % p.groups;
    first = group * per_group + task % tiles * p.tile;
    count = std::min(p.tile, per_group - task % tiles * p.tile);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
    base = memory ? reinterpret_cast<T*>((begin + sizeof(V) - 1) / sizeof(V) * sizeof(V)) : nullptr;
    const int64_t Q = p.chunk, N = p.state, P = p.width;
    for (Matrix<T>* m : {&B, &C, &dB, &dC}) *m = matrix(Q, N);
    for (Matrix<T>* m : {&B_turned, &C_turned}) *m = matrix(N, Q);
    for (Matrix<T>* m : {&shared, &shared_turned, &dshared, &dshared_turned}) *m = matrix(Q, Q);
    for (Matrix<T>* m : {&decay, &pairs, &dlog}) *m = matrix(Q, Q);
    for (Matrix<T>* m : {&x, &push, &scaled, &y, &dout, &dpush}) *m = matrix(Q, P);
    for (Matrix<T>* m : {&push_turned, &dout_turned}) *m = matrix(P, Q);
    for (Matrix<T>* m : {&state_turned, &dstate_turned}) *m = matrix(P, N);
    states = matrix(p.tile * N, P);
    dS = matrix(N, P);
    for (T** v : {&skips, &dskips}) *v = take(whole<T>(P));
    for (T** v : {&order, &size, &slope, &logs, &lost, &entering, &leaving}) *v = take(whole<T>(Q));
    for (T** v : {&dentering, &dleaving, &dexponent, &below}) *v = take(whole<T>(Q));
    dots = reinterpret_cast<V*>(take(Q * W));
    for (int64_t s = 0; memory && s < whole<T>(Q); ++s) order[s] = T(s);
  }

  static int64_t tiles_per_group(const Scan& p) {
    return (p.heads / p.groups + p.tile - 1) / p.tile;
  }
  static int64_t tasks(const Scan& p) { return p.batch * p.groups * tiles_per_group(p); }
  // Bytes that a task takes from its slot of the scratch.
  static int64_t scratch(const Scan& p) {
    return Tile(p, nullptr, 0).used * int64_t(sizeof(T)) + int64_t(sizeof(V));
  }

  void forward() {
    for (int64_t k = 0; k < count; ++k) {
      if (p.initial) {
        turn<T>(state_of(k), {p.initial.at<T>(batch, first + k), p.initial.stride[2]}, p.width, p.state);
      } else {
        std::fill(state_of(k)[0], state_of(k)[p.state], T(0));
      }
    }
    for (int64_t chunk = 0; chunk * p.chunk < p.tokens; ++chunk) {
      for (int64_t k = 0; p.states && k < count; ++k) {
        for (int64_t n = 0; n < p.state; ++n) {
          put(p.states.at<T>(batch, first + k, chunk * p.state + n), state_of(k)[n]);
        }
      }
      const int64_t end = end_of(chunk);
      for (int64_t from = chunk * p.chunk, to; from < end; from = to) {
        to = from + 1;
        while (to < end && !starts(to)) ++to;
        enter(from, to, to == end);
        share_turned();
        for (int64_t k = 0; k < count; ++k) advance(first + k, state_of(k));
      }
    }
    for (int64_t k = 0; k < count; ++k) {
      turn<T>(state_turned, state_of(k), p.state, p.width);
      for (int64_t c = 0; c < p.width; ++c) {
        std::copy(state_turned[c], state_turned[c] + p.state, p.final_state.at<T>(batch, first + k, c));
      }
    }
  }

  void backward(int64_t chunk) {
    const int64_t start = chunk * p.chunk, end = end_of(chunk);
    for (int64_t to = end, from; to > start; to = from) {
      from = to - 1;
      while (from > start && !starts(from)) --from;
      enter(from, to, to == end);
      product<T>(steps, steps, C_turned, B_turned, before(p.state), keep(shared));
      if (p.z) turn<T>(shared_turned, shared, steps, steps);  // of which `run` reads one half
      for (int64_t s = 0; s < steps; ++s) {
        std::fill(dB[s], dB[s] + whole<T>(p.state), T(0));
        std::fill(dC[s], dC[s] + whole<T>(p.state), T(0));
        std::fill(dshared[s], dshared[s] + whole<T>(p.chunk), T(0));
      }
      for (int64_t k = 0; k < count; ++k) retreat(first + k, chunk);
      turn<T>(dshared_turned, dshared, steps, steps);
      product<T>(steps, p.state, dshared_turned, B, up_to_last, add(dC));
      product<T>(steps, p.state, dshared, C, from_first(), add(dB));
      for (int64_t s = 0; s < steps; ++s) {
        std::copy(dB[s], dB[s] + p.state, p.shares.at<T>(0, task, from - start + s));
        std::copy(dC[s], dC[s] + p.state, p.shares.at<T>(1, task, from - start + s));
      }
    }
  }

 private:
  const Scan& p;
  const int64_t task;
  int64_t batch, group, first, count;  // the tile: heads first ... first + count
  int64_t begin = 0, steps = 0;        // the part of a chunk: steps begin ... begin + steps
  bool fresh = false, last = false;    // whether a sequence starts with it; whether it ends the chunk
  T* base;
  int64_t used = 0;

  // Of the tile; [step][n], [n][step] and [step][step].
  Matrix<T> B, C, B_turned, C_turned, dB, dC;
  Matrix<T> shared, dshared;                // C_i B_j, [i][j]
  Matrix<T> shared_turned, dshared_turned;  // [j][i]
  T* order;                                 // of each step its number
  // Of one head; [step][width]. push = x times the step size, y ungated, dout its gradient.
  Matrix<T> x, push, scaled, y, dout, dpush, push_turned, dout_turned;
  Matrix<T> states, dS;                     // [n][width], the states of all heads of the tile
  Matrix<T> state_turned, dstate_turned;    // [width][n]
  // From step j to step i, [i][j] (pairs [j][i] in `run`): decays, and with C Bᵀ; log decays' gradient.
  Matrix<T> decay, pairs, dlog;
  T *size, *slope;         // step sizes, and their slopes by what came in
  T *logs, *lost;          // log2 of the decay up to each step, and what its rounding lost
  T *entering, *leaving;   // decays from before the part to each step, and from there to its end
  T *dentering, *dleaving, *dexponent;  // gradients of their logarithms, and of each step's own
  T* below;                // sums of dlog over the rows from one on
  T *skips, *dskips;       // D and its gradient
  V* dots;
  T total = 0;             // the decay through the part

  T* take(int64_t size) {
    used += size;
    return base ? base + used - size : nullptr;
  }
  // Rows begin at different sets of the cache.
  Matrix<T> matrix(int64_t rows, int64_t columns) {
    const int64_t step = whole<T>(columns) + W;
    return {take(rows * step), step};
  }
  Matrix<T> state_of(int64_t k) const { return {states[k * p.state], states.step}; }
  int64_t end_of(int64_t chunk) const { return std::min((chunk + 1) * p.chunk, p.tokens); }
  int64_t token_of(int64_t step) const { return p.reverse ? p.tokens - 1 - step : step; }
  int64_t token(int64_t s) const { return token_of(begin + s); }
  bool starts(int64_t step) const { return p.starts && *p.starts.at<uint8_t>(batch, token_of(step)); }
  bool real(int64_t s) const { return !p.mask || *p.mask.at<uint8_t>(batch, token(s)); }
  int columns(int64_t c) const { return int(std::min<int64_t>(W, p.width - c)); }
  static V get(const T* from) { return load(from, 1, W); }
  void put(T* to, const T* from) const { std::copy(from, from + p.width, to); }

  // Depths of products of which one operand is 0 on one side of the diagonal, and what to do with sums.
  static auto all(int64_t depth) {
    return [depth](int64_t, int64_t, int64_t) { return Range{0, depth}; };
  }
  static Range up_to_last(int64_t, int64_t last, int64_t) { return {0, last}; }
  auto from_first() const {
    return [to = steps](int64_t first, int64_t, int64_t) { return Range{first, to}; };
  }
  // No panel that begins after the last row.
  static auto before(int64_t depth) {
    return [depth](int64_t, int64_t last, int64_t c) { return Range{0, c < last ? depth : 0}; };
  }
  static auto keep(Matrix<T> to) {
    return [to](int64_t i, int64_t c, const V(&sums)[2]) {
      store(to[i] + c, 1, W, sums[0]);
      store(to[i] + c + W, 1, W, sums[1]);
    };
  }
  static auto add(Matrix<T> to) {
    return [to](int64_t i, int64_t c, const V(&sums)[2]) {
      store(to[i] + c, 1, W, get(to[i] + c) + sums[0]);
      store(to[i] + c + W, 1, W, get(to[i] + c + W) + sums[1]);
    };
  }

  // The numbers of one token, zeros at padding whatever is there, and up to a whole panel.
  void fetch(T* to, const Array& from, int64_t s, int64_t of, int64_t size) const {
    const bool is_real = real(s);
    for (int64_t c = 0; c < whole<T>(size); c += W) {
      V v{};
      const int64_t left = std::min<int64_t>(W, size - c);
      if (is_real && left > 0) {
        v = load(from.at<T>(batch, token(s), of, c), from.stride[3], int(left));
      }
      store(to + c, 1, W, v);
    }
  }

  // `to` = each row of `from` times its factor.
  void scale(Matrix<T> to, Matrix<T> from, const T* factors) const {
    for (int64_t s = 0; s < steps; ++s) {
      for (int64_t c = 0; c < whole<T>(p.width); c += W) {
        store(to[s] + c, 1, W, get(from[s] + c) * factors[s]);
      }
    }
  }

  // Begin a part of a chunk: what its heads share.
  void enter(int64_t from, int64_t to, bool is_last) {
    begin = from;
    steps = to - from;
    fresh = starts(from);
    last = is_last;
    for (int64_t s = 0; s < steps; ++s) {
      fetch(B[s], p.B, s, group, p.state);
      fetch(C[s], p.C, s, group, p.state);
    }
    turn<T>(B_turned, B, steps, p.state);
    turn<T>(C_turned, C, steps, p.state);
  }
  void share_turned() {
    const auto depth = [n = p.state](int64_t first, int64_t, int64_t c) {
      return Range{0, c + PANEL<T> > first ? n : 0};
    };
    product<T>(steps, steps, B_turned, C_turned, depth, keep(shared_turned));
  }

  // The decays from some steps to others.
  static V decays(V sums, V lost, V sums_before, V lost_before) {
    return exp2_any<T>((sums - sums_before) + (lost - lost_before));
  }

  // Begin a head: its inputs, step sizes and decays.
  void stage(int64_t h) {
    const T A = *p.A.at<T>(h), bias = p.delta_bias ? *p.delta_bias.at<T>(h) : T(0);
    for (int64_t c = 0; c < whole<T>(p.width); c += W) {
      V D{};
      if (p.D && c < p.width) D = load(p.D.at<T>(h, c), p.D.stride[1], columns(c));
      store(skips + c, 1, W, D);
    }
    for (int64_t s = 0; s < steps; ++s) size[s] = real(s) ? *p.delta.at<T>(batch, token(s), h) : T(0);
    for (int64_t s = 0; s < steps; s += W) {
      V raw = get(size + s) + bias, rise = splat(T(1));
      if (p.softplus) {
        const V e = exp_minus_magnitude<T>(raw);
        rise = logistic<T>(raw, e);
        raw = softplus<T>(raw, e);
      }
      store(size + s, 1, W, raw);
      store(slope + s, 1, W, rise);
    }
    T sum = 0, gone = 0;
    for (int64_t s = 0; s < steps; ++s) {
      if (!real(s)) size[s] = slope[s] = 0;
      // no sum of a chunk may be infinite, or its difference to another would be NaN
      const T wanted = size[s] * (A * LOG2E<T>), before = sum;
      const T exponent = wanted < T(-LARGE) ? T(-LARGE) : wanted;
      sum += exponent;
      gone += (before - sum) + exponent;
      logs[s] = sum;
      lost[s] = gone;
      fetch(x[s], p.x, s, h, p.width);
    }
    for (int64_t s = 0; s < steps; s += W) {
      store(entering + s, 1, W, exp2_any<T>(get(logs + s)));
      store(leaving + s, 1, W, decays(splat(sum), splat(gone), get(logs + s), get(lost + s)));
    }
    total = entering[steps - 1];
    scale(push, x, size);
  }

  // Results of a head, and its state from before the part to behind it.
  void advance(int64_t h, Matrix<T> S) {
    stage(h);
    run(S);
    for (int64_t s = 0; s < steps; ++s) {
      T* to = p.y.at<T>(batch, token(s), h);
      for (int64_t c = 0; c < p.width; c += W) {
        V result{};
        if (real(s)) {
          result = get(y[s] + c);
          if (p.z) {
            const V z = load(p.z.at<T>(batch, token(s), h, c), p.z.stride[3], columns(c));
            result *= z * logistic<T>(z, exp_minus_magnitude<T>(z));
          }
        }
        store(to + c, 1, columns(c), result);
      }
    }
    if (!last) return;  // another sequence follows
    scale(scaled, push, leaving);
    product<T>(p.state, p.width, B, scaled, all(steps), pass_on(S));
  }

  // A state, or its gradient, decays through the part and gets the sums added; nothing of it is left
  // where a sequence starts.
  auto pass_on(Matrix<T> S) const {
    return [this, S](int64_t n, int64_t c, const V(&sums)[2]) {
      for (int half = 0; half < 2; ++half) {
        T* at = S[n] + c + half * W;
        store(at, 1, W, fresh ? sums[half] : get(at) * total + sums[half]);
      }
    };
  }

  // Results before the gate, from the state before the part.
  void run(Matrix<T> S) {
    for (int64_t j = 0; j < steps; ++j) {
      int64_t i = j / W * W;
      std::fill(pairs[j], pairs[j] + i, T(0));
      for (; i < steps; i += W) {
        const V d = decays(get(logs + i), get(lost + i), splat(logs[j]), splat(lost[j]));
        const V pair = get(shared_turned[j] + i) * d;
        store(pairs[j] + i, 1, W, get(order + i) >= T(j) ? pair : V{});
      }
    }
    product<T>(steps, p.width, pairs, push, up_to_last, keep(y));
    if (!fresh) {
      product<T>(steps, p.width, C_turned, S, all(p.state), [&](int64_t i, int64_t c, const V(&sums)[2]) {
        for (int half = 0; half < 2; ++half) {
          T* at = y[i] + c + half * W;
          store(at, 1, W, get(at) + sums[half] * entering[i]);
        }
      });
    }
    for (int64_t s = 0; p.D && s < steps; ++s) {
      for (int64_t c = 0; c < whole<T>(p.width); c += W) {
        store(y[s] + c, 1, W, get(y[s] + c) + get(x[s] + c) * get(skips + c));
      }
    }
  }

  // Gradients of a head; that of its state goes from behind the part to before it.
  void retreat(int64_t h, int64_t chunk) {
    const Matrix<T> S{p.states.at<T>(batch, h, chunk * p.state), p.width};
    stage(h);
    for (int64_t s = 0; s < steps; ++s) {
      if (p.dy) {
        fetch(dout[s], p.dy, s, h, p.width);
      } else {
        std::fill(dout[s], dout[s] + whole<T>(p.width), T(0));
      }
    }
    if (p.z) retreat_through_gate(h, S);
    turn<T>(dout_turned, dout, steps, p.width);
    turn<T>(push_turned, push, steps, p.width);
    std::fill(dentering, dentering + steps, T(0));
    std::fill(dleaving, dleaving + steps, T(0));
    T dtotal = 0;
    if (last) {
      for (int64_t n = 0; n < p.state; ++n) {
        for (int64_t c = 0; c < whole<T>(p.width); c += W) {
          const T* from = p.dstate.at<T>(batch, h, n, c);
          store(dS[n] + c, 1, W, c < p.width ? load(from, 1, columns(c)) : V{});
        }
      }
      if (!fresh) dtotal = dot(S, dS) * total;
      retreat_from_state();
    }
    retreat_from_pairs();
    if (!fresh) retreat_to_state(S);
    for (int64_t n = 0; n < p.state; ++n) {
      T* to = p.dstate.at<T>(batch, h, n);
      if (fresh) {
        std::fill(to, to + p.width, T(0));
      } else {
        put(to, dS[n]);
      }
    }
    sum_exponents(dtotal);
    give(h);
  }

  // What is pushed into the state behind the part, and by what.
  void retreat_from_state() {
    turn<T>(dstate_turned, dS, p.state, p.width);
    product<T>(steps, p.width, B_turned, dS, all(p.state), [&](int64_t j, int64_t c, const V(&sums)[2]) {
      store(dpush[j] + c, 1, W, sums[0] * leaving[j]);
      store(dpush[j] + c + W, 1, W, sums[1] * leaving[j]);
    });
    weigh(push_turned, dstate_turned, B, leaving, dB, dleaving);
  }

  // What is pushed into the results of the step itself and later ones, and the pairs.
  void retreat_from_pairs() {
    for (int64_t i = 0; i < steps; ++i) {
      for (int64_t j = 0; j < whole<T>(steps); j += W) {
        V d{}, pair{};
        if (j <= i) {
          const auto earlier = get(order + j) <= T(i);
          d = decays(splat(logs[i]), splat(lost[i]), get(logs + j), get(lost + j));
          pair = get(shared[i] + j) * d;
          d = earlier ? d : V{};
          pair = earlier ? pair : V{};
        }
        store(decay[i] + j, 1, W, d);
        store(pairs[i] + j, 1, W, pair);
      }
    }
    if (!last) {
      for (int64_t s = 0; s < steps; ++s) std::fill(dpush[s], dpush[s] + whole<T>(p.width), T(0));
    }
    product<T>(steps, p.width, pairs, dout, from_first(), add(dpush));
    product<T>(steps, steps, dout_turned, push_turned, before(p.width),
               [&](int64_t i, int64_t c, const V(&sums)[2]) {
                 for (int half = 0; half < 2; ++half) {
                   const int64_t j = c + half * W;
                   store(dlog[i] + j, 1, W, sums[half] * get(pairs[i] + j));
                   store(dshared[i] + j, 1, W, get(dshared[i] + j) + sums[half] * get(decay[i] + j));
                 }
               });
  }

  // The state before the part, and what it is multiplied with.
  void retreat_to_state(Matrix<T> S) {
    turn<T>(state_turned, S, p.state, p.width);
    weigh(dout_turned, state_turned, C, entering, dC, dentering);
    scale(scaled, dout, entering);
    if (!last) {  // nothing came from behind it
      product<T>(p.state, p.width, C, scaled, all(steps), keep(dS));
    } else {
      product<T>(p.state, p.width, C, scaled, all(steps), pass_on(dS));
    }
  }

  // `to` += Xᵀ Y, each row times its factor, and the gradient of the factor's logarithm if that product
  // is what `by` is multiplied with.
  void weigh(Matrix<T> X, Matrix<T> Y, Matrix<T> by, const T* factors, Matrix<T> to, T* dfactors) {
    std::fill(dots, dots + steps, V{});
    product<T>(steps, p.state, X, Y, all(p.width), [&](int64_t i, int64_t c, const V(&sums)[2]) {
      for (int half = 0; half < 2; ++half) {
        const int64_t at = c + half * W;
        dots[i] += sums[half] * get(by[i] + at);
        store(to[i] + at, 1, W, get(to[i] + at) + sums[half] * factors[i]);
      }
    });
    for (int64_t s = 0; s < steps; ++s) dfactors[s] = sum<T>(dots[s]) * factors[s];
  }

  T dot(Matrix<T> kept, Matrix<T> other) const {
    V products{};
    for (int64_t n = 0; n < p.state; ++n) {
      for (int64_t c = 0; c < p.width; c += W) {
        products += load(kept[n] + c, 1, columns(c)) * get(other[n] + c);
      }
    }
    return sum<T>(products);
  }

  // dz, and dout by what goes through the gate.
  void retreat_through_gate(int64_t h, Matrix<T> kept) {
    const Matrix<T> S = state_of(0);
    for (int64_t n = 0; !fresh && n < p.state; ++n) {
      for (int64_t c = 0; c < whole<T>(p.width); c += W) {
        store(S[n] + c, 1, W, c < p.width ? load(kept[n] + c, 1, columns(c)) : V{});
      }
    }
    run(S);
    for (int64_t s = 0; s < steps; ++s) {
      const bool is_real = real(s);
      for (int64_t c = 0; c < p.width; c += W) {
        V around{}, through{};
        if (is_real) {
          const V z = load(p.z.at<T>(batch, token(s), h, c), p.z.stride[3], columns(c));
          const V open = logistic<T>(z, exp_minus_magnitude<T>(z)), dy = get(dout[s] + c);
          around = dy * get(y[s] + c) * open * (T(1) + z * (T(1) - open));
          through = dy * z * open;
        }
        store(p.dz.at<T>(batch, token(s), h, c), 1, columns(c), around);
        store(dout[s] + c, 1, W, through);
      }
    }
  }

  // The gradient of each step's exponent: of the pairs that it lies between, each added where it
  // belongs (as a difference of sums, those around a large step would be lost in what cancels), of the
  // decays to the steps from it on, from the steps before it, and through the part.
  void sum_exponents(T dtotal) {
    T later = 0, earlier = 0;
    std::fill(below, below + whole<T>(steps), T(0));
    for (int64_t k = steps - 1; k >= 0; --k) {
      V across{};
      for (int64_t j = 0; j <= k; j += W) {
        const V column = get(below + j) + get(dlog[k] + j);
        store(below + j, 1, W, column);
        across += get(order + j) < T(k) ? column : V{};
      }
      later += dentering[k];
      dexponent[k] = sum<T>(across) + later;
    }
    for (int64_t k = 0; k < steps; ++k) {
      dexponent[k] += earlier + dtotal;
      earlier += dleaving[k];
    }
  }

  // Results: gradients of x and delta, and the head's sums.
  void give(int64_t h) {
    double* to = p.sums.at<double>(batch, h);
    const T A = *p.A.at<T>(h);
    T dA = 0, dbias = 0;
    std::fill(dskips, dskips + whole<T>(p.width), T(0));
    for (int64_t s = 0; s < steps; ++s) {
      const bool is_real = real(s);
      V products{};
      for (int64_t c = 0; c < p.width; c += W) {
        const V dp = get(dpush[s] + c), g = get(dout[s] + c), value = get(x[s] + c);
        products += dp * value;
        V dx = dp * size[s];
        if (p.D) dx += g * get(skips + c);
        store(p.dx.at<T>(batch, token(s), h, c), 1, columns(c), is_real ? dx : V{});
        store(dskips + c, 1, W, get(dskips + c) + g * value);
      }
      const T ddelta = is_real ? (sum<T>(products) + dexponent[s] * A) * slope[s] : T(0);
      *p.ddelta.at<T>(batch, token(s), h) = ddelta;
      dA += dexponent[s] * size[s];
      dbias += ddelta;
    }
    for (int64_t c = 0; c < p.width; ++c) to[c] += dskips[c];
    to[p.width] += dA;
    to[p.width + 1] += dbias;
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
    const bool real = !p.mask || *p.mask.at<uint8_t>(batch, token);
    for (int of = 0; of < 2; ++of) {
      T* to = (of ? p.dC : p.dB).template at<T>(batch, token, group);
      std::fill(to, to + p.state, T(0));
      for (int64_t tile = owner * tiles; real && tile < (owner + 1) * tiles; ++tile) {
        const T* share = p.shares.at<T>(of, tile, s);
        for (int64_t n = 0; n < p.state; ++n) to[n] += share[n];
      }
    }
  }
}

template <class T>
void forward(const Scan& p) {
  parallel(Tile<T>::tasks(p), p.threads, [&](int64_t slot, int64_t task) {
    Tile<T>(p, p.scratch.at<char>(slot), task).forward();
  });
}

template <class T>
void backward(const Scan& p) {
  for (int64_t chunk = (p.tokens + p.chunk - 1) / p.chunk - 1; chunk >= 0; --chunk) {
    parallel(Tile<T>::tasks(p), p.threads, [&](int64_t slot, int64_t task) {
      Tile<T>(p, p.scratch.at<char>(slot), task).backward(chunk);
    });
    const int64_t steps = std::min(p.chunk, p.tokens - chunk * p.chunk);
    const int64_t parts = (steps + SHARE_ROWS - 1) / SHARE_ROWS;
    parallel(p.batch * p.groups * parts, p.threads,
             [&](int64_t, int64_t part) { gather_shares<T>(p, chunk, part, parts); });
  }
}

}  // namespace

extern "C" {
int64_t brickwork_ssd_scratch(const Scan* scan) {
  return std::max(Tile<float>::scratch(*scan), Tile<double>::scratch(*scan));
}
void brickwork_ssd_forward_float32(const Scan* scan) { forward<float>(*scan); }
void brickwork_ssd_forward_float64(const Scan* scan) { forward<double>(*scan); }
void brickwork_ssd_backward_float32(const Scan* scan) { backward<float>(*scan); }
void brickwork_ssd_backward_float64(const Scan* scan) { backward<double>(*scan); }
}

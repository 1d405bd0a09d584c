// Attention, experts and matrix products for one new token, for token_step_cpu.py.
//
// Each weight is read once, a few rows of it at a time, by all threads; what lies between the products
// is small and stays with the thread that needs it. Nothing depends on the number of threads.

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu_vector.h"

using namespace brickwork;

// Their twins are in token_step_cpu.py: the same fields in the same order. Vectors are contiguous, so
// are the columns of matrices.
struct Product {
  int64_t rows, columns, threads;
  Array weight, bias, x, y;  // (rows, columns), (rows) or absent, (columns), (rows)
};

struct AttentionStep {
  // Slot `slot` of the buffers is the new token's, the former ones are filled.
  int64_t columns, heads, groups, width, slot, threads;
  double eps, norm_eps;
  Array x, y;                         // (columns): the input; x + norm(attention(x))
  Array query, key, value, output;    // projections, (heads or groups * width, columns), the last mT
  Array query_bias, key_bias, value_bias, output_bias;  // or absent
  Array query_norm, key_norm, norm;   // (heads * width), (groups * width), (columns): RMS weights
  Array cos, sin;                     // (width): of the new token, -sin in the first half
  Array keys, values;                 // (groups, slots, width)
  Array seen;                         // (slots) bool, or absent where all are
  Array scratch;                      // heads * width * 2 + groups * width * 2 + heads * slots
};

struct ExpertsStep {
  int64_t columns, hidden, experts, chosen, normalize, threads;
  double norm_eps;
  Array x, y;             // (columns): the input; x + norm(experts(x))
  Array router, bias;     // (experts, columns), (experts) or absent
  Array gate_up, down;    // (experts, 2 * hidden, columns), (experts, columns, hidden)
  Array norm;             // (columns)
  Array indices;          // (experts), int64
  Array scratch;          // experts + chosen * hidden
};

namespace {

constexpr int64_t ROWS = 16;             // of a weight, to a task
constexpr int64_t ALONE = 48 * 1024;     // products of fewer terms than this stay with one thread

template <class T>
T dot(const T* a, const T* b, int64_t n) {
  constexpr int W = lanes<T>;
  Vec<T> sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    for (int k = 0; k < 4; ++k) sums[k] += load(a + i + k * W, 1, W) * load(b + i + k * W, 1, W);
  }
  for (; i + W <= n; i += W) sums[0] += load(a + i, 1, W) * load(b + i, 1, W);
  if (i < n) sums[1] += load(a + i, 1, int(n - i)) * load(b + i, 1, int(n - i));
  return sum<T>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// run(first, last) for ranges of `rows` rows of `terms` terms each, in parallel where it pays.
template <class Run>
void by_rows(int64_t rows, int64_t terms, int64_t threads, const Run& run) {
  parallel((rows + ROWS - 1) / ROWS, rows * terms < ALONE ? 1 : threads, [&](int64_t, int64_t task) {
    run(task * ROWS, std::min(task * ROWS + ROWS, rows));
  });
}

template <class T>
T row_product(const Array& weight, const Array& bias, const T* x, int64_t row, int64_t columns) {
  return dot(weight.at<T>(row), x, columns) + (bias ? *bias.at<T>(row) : T(0));
}

template <class T>
T inverse_root(const T* x, int64_t n, double eps) {
  return T(1) / std::sqrt(dot(x, x, n) / T(n) + T(eps));
}

// y = x + norm(y).
template <class T>
void add_norm(const T* x, T* y, const T* weight, int64_t n, double eps) {
  const T root = inverse_root(y, n, eps);
  for (int64_t c = 0; c < n; ++c) y[c] = x[c] + y[c] * root * weight[c];
}

// exp(x - peak) in place, and their sum.
template <class T>
T exponentials(T* x, int64_t n, T peak) {
  constexpr int W = lanes<T>;
  Vec<T> total{};
  for (int64_t i = 0; i < n; i += W) {
    const int count = int(std::min<int64_t>(W, n - i));
    Vec<T> e = exp2_below<T>((load(x + i, 1, count) - peak) * T(1.4426950408889634074));
    for (int k = count; k < W; ++k) e[k] = 0;
    store(x + i, 1, count, e);
    total += e;
  }
  return sum<T>(total);
}

template <class T>
class Attention {
 public:
  explicit Attention(const AttentionStep& p)
      : p(p),
        wide(p.heads * p.width),
        narrow(p.groups * p.width),
        query(p.scratch.at<T>(0)),
        key(query + wide),
        value(key + narrow),
        mixed(value + narrow),
        scores(mixed + wide) {}

  void run() const {
    const T* x = p.x.at<T>(0);
    by_rows(wide + 2 * narrow, p.columns, p.threads, [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row) query[row] = project(row, x);
    });
    const T of_queries = inverse_root(query, wide, p.eps), of_keys = inverse_root(key, narrow, p.eps);
    const int64_t terms = 2 * p.heads * p.width * (p.slot + 1);
    parallel(p.groups, terms < ALONE ? 1 : p.threads, [&](int64_t, int64_t group) {
      append(group, of_keys);
      const int64_t heads = p.heads / p.groups;
      for (int64_t head = group * heads; head < (group + 1) * heads; ++head) {
        turn(query + head * p.width, p.query_norm.at<T>(head * p.width), of_queries);
        attend(head, group);
      }
    });
    T* y = p.y.at<T>(0);
    by_rows(p.columns, wide, p.threads, [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row) {
        y[row] = row_product(p.output, p.output_bias, mixed, row, wide);
      }
    });
    add_norm(x, y, p.norm.at<T>(0), p.columns, p.norm_eps);
  }

 private:
  const AttentionStep& p;
  const int64_t wide, narrow;
  T *query, *key, *value, *mixed, *scores;  // query, key and value follow one another

  T project(int64_t row, const T* x) const {
    if (row < wide) return row_product(p.query, p.query_bias, x, row, p.columns);
    row -= wide;
    if (row < narrow) return row_product(p.key, p.key_bias, x, row, p.columns);
    return row_product(p.value, p.value_bias, x, row - narrow, p.columns);
  }

  // Normalise and rotate one head.
  void turn(T* head, const T* weight, T root) const {
    const T *cos = p.cos.at<T>(0), *sin = p.sin.at<T>(0);
    const int64_t half = p.width / 2;
    for (int64_t i = 0; i < p.width; ++i) head[i] *= root * weight[i];
    for (int64_t i = 0; i < half; ++i) {
      const T u = head[i], v = head[i + half];
      head[i] = u * cos[i] + v * sin[i];
      head[i + half] = v * cos[i + half] + u * sin[i + half];
    }
  }

  void append(int64_t group, T root) const {
    T* mine = key + group * p.width;
    turn(mine, p.key_norm.at<T>(group * p.width), root);
    std::copy(mine, mine + p.width, p.keys.at<T>(group, p.slot));
    const T* new_value = value + group * p.width;
    std::copy(new_value, new_value + p.width, p.values.at<T>(group, p.slot));
  }

  void attend(int64_t head, int64_t group) const {
    const T scale = T(1) / std::sqrt(T(p.width));
    const T* q = query + head * p.width;
    T* score = scores + head * (p.slot + 1);
    T peak = -std::numeric_limits<T>::infinity();
    for (int64_t t = 0; t <= p.slot; ++t) {
      const bool hidden = p.seen && !*p.seen.at<uint8_t>(t);
      score[t] = hidden ? -std::numeric_limits<T>::infinity()
                        : scale * dot(q, p.keys.at<T>(group, t), p.width);
      if (!(score[t] <= peak)) peak = score[t];  // a NaN becomes the peak
    }
    const T total = exponentials(score, p.slot + 1, peak);
    T* y = mixed + head * p.width;
    std::fill(y, y + p.width, T(0));
    for (int64_t t = 0; t <= p.slot; ++t) {
      const T share = score[t] / total, *v = p.values.at<T>(group, t);
      if (share == 0) continue;  // padding, whose values may be anything
      for (int64_t i = 0; i < p.width; ++i) y[i] += share * v[i];
    }
  }
};

// The `chosen` largest of the weights, in order, the first of equal ones first: their indices, and the
// weights moved to the front.
template <class T>
void choose(const ExpertsStep& p, T* weight, int64_t* index) {
  for (int64_t e = 0; e < p.experts; ++e) index[e] = e;
  for (int64_t k = 0; k < p.chosen; ++k) {
    int64_t best = k;
    for (int64_t e = k + 1; e < p.experts; ++e) {
      if (weight[e] > weight[best]) best = e;
    }
    std::rotate(weight + k, weight + best, weight + best + 1);
    std::rotate(index + k, index + best, index + best + 1);
  }
}

template <class T>
void experts_step(const ExpertsStep& p) {
  const T* x = p.x.at<T>(0);
  T *y = p.y.at<T>(0), *weight = p.scratch.at<T>(0), *hidden = weight + p.experts;
  int64_t* index = p.indices.at<int64_t>(0);
  by_rows(p.experts, p.columns, p.threads, [&](int64_t from, int64_t to) {
    for (int64_t e = from; e < to; ++e) weight[e] = row_product(p.router, p.bias, x, e, p.columns);
  });
  const T total = exponentials(weight, p.experts, *std::max_element(weight, weight + p.experts));
  choose(p, weight, index);
  T kept = total;
  if (p.normalize && total == total) {  // a NaN reaches every weight
    kept = 0;
    for (int64_t k = 0; k < p.chosen; ++k) kept += weight[k];
  }
  by_rows(p.chosen * p.hidden, 2 * p.columns, p.threads, [&](int64_t from, int64_t to) {
    constexpr int W = lanes<T>;
    for (int64_t row = from; row < to; row += W) {
      const int count = int(std::min<int64_t>(W, to - row));
      Vec<T> gate{}, up{};
      for (int k = 0; k < count; ++k) {
        const int64_t e = index[(row + k) / p.hidden], f = (row + k) % p.hidden;
        gate[k] = dot(p.gate_up.at<T>(e, f), x, p.columns);
        up[k] = dot(p.gate_up.at<T>(e, f + p.hidden), x, p.columns);
      }
      const Vec<T> silu = gate * logistic<T>(gate, exp_minus_magnitude<T>(gate));
      store(hidden + row, 1, count, silu * up);
    }
  });
  by_rows(p.columns, p.chosen * p.hidden, p.threads, [&](int64_t from, int64_t to) {
    for (int64_t c = from; c < to; ++c) {
      T mixed = 0;
      for (int64_t k = 0; k < p.chosen; ++k) {
        const T of_expert = dot(p.down.at<T>(index[k], c), hidden + k * p.hidden, p.hidden);
        mixed += weight[k] / kept * of_expert;
      }
      y[c] = mixed;
    }
  });
  add_norm(x, y, p.norm.at<T>(0), p.columns, p.norm_eps);
}

template <class T>
void product(const Product& p) {
  T* y = p.y.at<T>(0);
  by_rows(p.rows, p.columns, p.threads, [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; ++row) {
      y[row] = row_product(p.weight, p.bias, p.x.at<T>(0), row, p.columns);
    }
  });
}

}  // namespace

extern "C" {
void brickwork_product_float32(const Product* step) { product<float>(*step); }
void brickwork_product_float64(const Product* step) { product<double>(*step); }
void brickwork_attention_step_float32(const AttentionStep* step) { Attention<float>(*step).run(); }
void brickwork_attention_step_float64(const AttentionStep* step) { Attention<double>(*step).run(); }
void brickwork_experts_step_float32(const ExpertsStep* step) { experts_step<float>(*step); }
void brickwork_experts_step_float64(const ExpertsStep* step) { experts_step<double>(*step); }
}

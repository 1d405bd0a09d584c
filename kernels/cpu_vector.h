// Arrays, vectors, elementary functions and threads for the compiled CPU kernels.
//
// Only the C++ standard library and the vector types of gcc and clang, no header of PyTorch: a build
// takes seconds, and its result knows nothing of PyTorch's binary interface.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <xmmintrin.h>
#endif

#if defined(__AVX512F__)
#define BRICKWORK_VECTOR_BYTES 64
#elif defined(__AVX__)
#define BRICKWORK_VECTOR_BYTES 32
#else
#define BRICKWORK_VECTOR_BYTES 16
#endif

namespace brickwork {

// A tensor's memory and its strides in elements; its twin is `Array` in cpu_extension.py.
struct Array {
  char* data;
  int64_t stride[4];
  template <class T>
  T* at(int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) const {
    return reinterpret_cast<T*>(data) + i * stride[0] + j * stride[1] + k * stride[2] + l * stride[3];
  }
  explicit operator bool() const { return data; }
};

template <class T>
struct Simd;

template <>
struct Simd<float> {
  typedef float Vector __attribute__((vector_size(BRICKWORK_VECTOR_BYTES)));
  typedef int32_t Bits __attribute__((vector_size(BRICKWORK_VECTOR_BYTES)));
  static constexpr int mantissa = 23, bias = 127, small = 126;
  static constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
};

template <>
struct Simd<double> {
  typedef double Vector __attribute__((vector_size(BRICKWORK_VECTOR_BYTES)));
  typedef int64_t Bits __attribute__((vector_size(BRICKWORK_VECTOR_BYTES)));
  static constexpr int mantissa = 52, bias = 1023, small = 1022;
  static constexpr double rounder = 6755399441055744.0;  // 1.5 * 2^52
};

template <class T>
using Vec = typename Simd<T>::Vector;

template <class T>
constexpr int lanes = BRICKWORK_VECTOR_BYTES / int(sizeof(T));

template <class T>
inline Vec<T> splat(T value) {
  return value - Vec<T>{};
}

template <class T>
inline Vec<T> magnitude(Vec<T> x) {
  return x < T(0) ? -x : x;
}

// The first `count` lanes, `stride` elements apart; zeros beyond them.
template <class T>
inline Vec<T> load(const T* from, int64_t stride, int count) {
  Vec<T> v{};
  if (count == lanes<T> && stride == 1) {
    std::memcpy(&v, from, sizeof v);
  } else {
    for (int k = 0; k < count; ++k) v[k] = from[k * stride];
  }
  return v;
}

template <class T>
inline void store(T* to, int64_t stride, int count, Vec<T> v) {
  if (count == lanes<T> && stride == 1) {
    std::memcpy(to, &v, sizeof v);
  } else {
    for (int k = 0; k < count; ++k) to[k * stride] = v[k];
  }
}

// A whole vector past the caches, where nobody will read it soon and `to` allows it: its line need not
// be fetched to be overwritten. Others see it once this thread has done an atomic operation.
template <class T>
inline void stream(T* to, Vec<T> v) {
#if defined(__AVX__)
  if (reinterpret_cast<uintptr_t>(to) % sizeof v == 0) {
#if defined(__AVX512F__)
    return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)v);
#else
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)v);
#endif
  }
#endif
  store(to, 1, lanes<T>, v);
}

// Lane k of the result is lane k ^ DISTANCE of v.
template <class T, int DISTANCE, int... K>
inline Vec<T> crossed(Vec<T> v, std::integer_sequence<int, K...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, (K ^ DISTANCE)...);
#else
  return __builtin_shuffle(v, typename Simd<T>::Bits{(K ^ DISTANCE)...});
#endif
}

// The sum of the lanes.
template <class T, int DISTANCE = lanes<T> / 2>
inline T sum(Vec<T> v) {
  if constexpr (DISTANCE == 0) {
    return v[0];
  } else {
    return sum<T, DISTANCE / 2>(v + crossed<T, DISTANCE>(v, std::make_integer_sequence<int, lanes<T>>()));
  }
}

// Lane k is a[k] + a[k ^ DISTANCE] where bit DISTANCE of k is 0, b's elsewhere.
template <class T, int DISTANCE, int... K>
inline Vec<T> folded(Vec<T> a, Vec<T> b, std::integer_sequence<int, K...>) {
  constexpr int W = lanes<T>;
#if defined(__clang__)
  const Vec<T> own = __builtin_shufflevector(a, b, (K & DISTANCE ? K + W : K)...);
  const Vec<T> other = __builtin_shufflevector(a, b, ((K & DISTANCE ? K + W : K) ^ DISTANCE)...);
#else
  using Bits = typename Simd<T>::Bits;
  const Vec<T> own = __builtin_shuffle(a, b, Bits{(K & DISTANCE ? K + W : K)...});
  const Vec<T> other = __builtin_shuffle(a, b, Bits{((K & DISTANCE ? K + W : K) ^ DISTANCE)...});
#endif
  return own + other;
}

// Lane k is the sum of the lanes of v[k].
template <class T, int DISTANCE = 1>
inline Vec<T> sums(const Vec<T>* v) {
  constexpr int W = lanes<T>;
  if constexpr (DISTANCE == W) {
    return v[0];
  } else {
    Vec<T> folds[W / 2 / DISTANCE];
    for (int k = 0; k < W / 2 / DISTANCE; ++k) {
      folds[k] = folded<T, DISTANCE>(v[2 * k], v[2 * k + 1], std::make_integer_sequence<int, W>());
    }
    return sums<T, 2 * DISTANCE>(folds);
  }
}

// 2^f - 1 = f q(f) for |f| <= 1/2. A product with f: exact at 0, where the slow decays lie, so that
// errors do not pile up over a long memory. float: minimax, relative error of 2^f below 1e-7;
// double: Taylor, below 2e-16.
inline Vec<float> exp2_fraction(Vec<float> f) {
  Vec<float> q = splat(0.0013264727247215347f) * f + 0.009671512688178991f;
  q = q * f + 0.05550733743574254f;
  q = q * f + 0.2402224208463469f;
  q = q * f + 0.6931469775987174f;
  return q * f + 1.0f;
}

inline Vec<double> exp2_fraction(Vec<double> f) {
  Vec<double> q = splat(2.5678435993488206e-11) * f + 4.4455382718708116e-10;
  q = q * f + 7.0549116208011234e-09;
  q = q * f + 1.0178086009239699e-07;
  q = q * f + 1.3215486790144309e-06;
  q = q * f + 1.5252733804059841e-05;
  q = q * f + 0.00015403530393381608;
  q = q * f + 0.0013333558146428441;
  q = q * f + 0.0096181291076284769;
  q = q * f + 0.055504108664821576;
  q = q * f + 0.24022650695910072;
  q = q * f + 0.69314718055994529;
  return q * f + 1.0;
}

// The same vector, but for the compiler: x - y stays a subtraction where x is a product. Fused, it
// would take the place of a multiplication that the processor could do beside it.
template <class T>
inline Vec<T> apart(Vec<T> x) {
#if defined(__SSE2__)
  asm("" : "+v"(x));
#endif
  return x;
}

// 2^x where |x| is known to be at most Simd<T>::small.
template <class T>
inline Vec<T> exp2_small(Vec<T> x) {
  using Bits = typename Simd<T>::Bits;
  const Vec<T> rounded = x + Simd<T>::rounder;
  const Vec<T> p = exp2_fraction(apart<T>(x) - (rounded - Simd<T>::rounder));
  return (Vec<T>)((Bits)p + ((Bits)rounded << Simd<T>::mantissa));
}

// 2^x for x up to the largest exponent: 0 below the normal numbers, NaN for NaN.
template <class T>
inline Vec<T> exp2_below(Vec<T> x) {
  using Bits = typename Simd<T>::Bits;
  constexpr T low = -Simd<T>::bias, rounder = Simd<T>::rounder + Simd<T>::bias;
  x = x < low ? splat(low) : x;
  const Vec<T> rounded = x + rounder;
  const Vec<T> power = (Vec<T>)((Bits)rounded << Simd<T>::mantissa);
  return exp2_fraction(x - (rounded - rounder)) * power;
}

// 2^x for any x, infinity above the normal numbers.
template <class T>
inline Vec<T> exp2_any(Vec<T> x) {
  constexpr T high = Simd<T>::bias + 1;
  return exp2_below<T>(x > high ? splat(high) : x);
}

// log(1 + u) for 0 <= u <= 1, relative error below 1e-7 (double: the C library's).
inline Vec<float> log1p_unit(Vec<float> u) {
  Vec<float> q = splat(-0.0032440219803145202f) * u + 0.019851447702928647f;
  q = q * u - 0.05695950598996266f;
  q = q * u + 0.10603651906305123f;
  q = q * u - 0.15305590709926017f;
  q = q * u + 0.19675938555381456f;
  q = q * u - 0.24954133500694492f;
  q = q * u + 0.3332996239807233f;
  q = q * u - 0.4999990242177167f;
  q = q * u + 0.9999999952870613f;
  return q * u;
}

inline Vec<double> log1p_unit(Vec<double> u) {
  for (int k = 0; k < lanes<double>; ++k) u[k] = __builtin_log1p(u[k]);
  return u;
}

// exp(-|x|), from which softplus and the logistic function follow without overflow.
template <class T>
inline Vec<T> exp_minus_magnitude(Vec<T> x) {
  return exp2_below<T>(magnitude<T>(x) * T(-1.4426950408889634074));
}

template <class T>
inline Vec<T> logistic(Vec<T> x, Vec<T> exp_minus) {
  const Vec<T> positive = T(1) / (T(1) + exp_minus);
  return x < T(0) ? exp_minus * positive : positive;
}

template <class T>
inline Vec<T> softplus(Vec<T> x, Vec<T> exp_minus) {
  return (x < T(0) ? Vec<T>{} : x) + log1p_unit(exp_minus);
}

// While one lives, subnormal numbers are 0: a decaying state would meet them, and on x86 an
// operation on them costs a hundred others.
struct FlushSubnormals {
#if defined(__SSE2__)
  const unsigned before = _mm_getcsr();
  FlushSubnormals() { _mm_setcsr(before | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before); }
#endif
};

// GOMP_parallel of the OpenMP runtime that PyTorch itself uses, handed over by the loader: a second
// pool of threads would fight its waiting ones for the cores. Without it, plain threads.
using TeamStart = void (*)(void (*)(void*), void*, unsigned, unsigned);
inline TeamStart team_start = nullptr;

// run(slot, task) for every task, at most `threads` at once, each of them with a slot of its own.
template <class Run>
void parallel(int64_t tasks, int64_t threads, const Run& run) {
  struct Shared {
    const Run& run;
    const int64_t tasks;
    std::atomic<int64_t> task{0}, slot{0};
    static void work(void* data) {
      Shared& shared = *static_cast<Shared*>(data);
      const FlushSubnormals flush;
      const int64_t slot = shared.slot++;
      for (int64_t task; (task = shared.task++) < shared.tasks;) shared.run(slot, task);
    }
  } shared{run, tasks};
  if (threads > tasks) threads = tasks;
  if (threads <= 1) return Shared::work(&shared);
  if (team_start) return team_start(Shared::work, &shared, unsigned(threads), 0);
  std::vector<std::thread> others;
  others.reserve(threads);
  try {
    while (int64_t(others.size()) < threads - 1) others.emplace_back(Shared::work, &shared);
  } catch (const std::system_error&) {  // no more threads to be had: those that run do all tasks
  }
  Shared::work(&shared);
  for (std::thread& other : others) other.join();
}

}  // namespace brickwork

extern "C" void brickwork_team_start(brickwork::TeamStart start) { brickwork::team_start = start; }

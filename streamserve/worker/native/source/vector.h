// Vectors of float32 as wide as the processor's, in the extension that GCC and Clang share: one source serves
// AVX-512, AVX2, SSE and NEON. Sums of products are fused where the processor can (-ffp-contract=fast).
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace streamserve {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
// Vectors of a row that a loop over products keeps in registers: with four rows, half of those there are.
constexpr int kWide = kLanes == 16 ? 4 : 2;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// The upper half of a float32.
struct Bfloat16 {
  uint16_t bits;
};

// Subtracted, not added: that is a number of its own for no x, so it costs nothing.
inline Floats all(float x) { return x - Floats{}; }

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// GCC widens half a vector at a time where it is not told the instruction.
inline Words widened(const Bfloat16* from) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Halves half;
  std::memcpy(&half, from, sizeof half);
  return __builtin_convertvector(half, Words);
#endif
}

inline Floats load(const Bfloat16* from) { return (Floats)(widened(from) << 16); }

// The first `count` numbers, and zeros: what lies behind a row may be anything, or not be there.
template <typename T>
Floats load_some(const T* from, int count) {
  if (count == kLanes) return load(from);
  T padded[kLanes] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// Rounds to nearest, ties to even, as torch does.
inline void store(Bfloat16* to, Floats x) {
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words quiet_nan = Words{} + 0x7fc0;
  const Halves half = __builtin_convertvector((Words)(x == x ? (Ints)rounded : (Ints)quiet_nan), Halves);
  std::memcpy(to, &half, sizeof half);
}

template <typename T>
void store_some(T* to, Floats x, int count) {
  if (count == kLanes) return store(to, x);
  T padded[kLanes];
  store(padded, x);
  std::memcpy(to, padded, count * sizeof(T));
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

#if defined(__clang__) || __GNUC__ >= 12
#define STREAMSERVE_PERMUTE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define STREAMSERVE_PERMUTE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// Of the lanes of a and b, one after the other: those whose index lacks the bit `Step`, and those that have it.
template <int Step>
Floats lower(Floats a, Floats b);
template <int Step>
Floats upper(Floats a, Floats b);

#define STREAMSERVE_HALVES(step, lower_half, upper_half) \
  template <>                                            \
  inline Floats lower<step>(Floats a, Floats b) {        \
    return STREAMSERVE_PERMUTE lower_half;               \
  }                                                      \
  template <>                                            \
  inline Floats upper<step>(Floats a, Floats b) {        \
    return STREAMSERVE_PERMUTE upper_half;               \
  }

#if defined(__AVX512F__)
STREAMSERVE_HALVES(8, (a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                 (a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
STREAMSERVE_HALVES(4, (a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                 (a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
STREAMSERVE_HALVES(2, (a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
                 (a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))
STREAMSERVE_HALVES(1, (a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                 (a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
#elif defined(__AVX2__)
STREAMSERVE_HALVES(4, (a, b, 0, 1, 2, 3, 8, 9, 10, 11), (a, b, 4, 5, 6, 7, 12, 13, 14, 15))
STREAMSERVE_HALVES(2, (a, b, 0, 1, 4, 5, 8, 9, 12, 13), (a, b, 2, 3, 6, 7, 10, 11, 14, 15))
STREAMSERVE_HALVES(1, (a, b, 0, 2, 4, 6, 8, 10, 12, 14), (a, b, 1, 3, 5, 7, 9, 11, 13, 15))
#else
STREAMSERVE_HALVES(2, (a, b, 0, 1, 4, 5), (a, b, 2, 3, 6, 7))
STREAMSERVE_HALVES(1, (a, b, 0, 2, 4, 6), (a, b, 1, 3, 5, 7))
#endif

// Halves the number of partial sums, of two vectors at once.
template <int Step>
Floats fold(Floats a, Floats b) {
  return lower<Step>(a, b) + upper<Step>(a, b);
}

// The sums of kLanes vectors, or the partial sums of `Count` of them, kLanes / Count of each, in their order.
template <int Count>
Floats sums(const Floats* x) {
  if constexpr (Count == 1) {
    return x[0];
  } else {
    return fold<kLanes / Count>(sums<Count / 2>(x), sums<Count / 2>(x + Count / 2));
  }
}

template <int Step = kLanes / 2>
float sum(Floats x) {
  if constexpr (Step == 0) {
    return x[0];
  } else {
    return sum<Step / 2>(fold<Step>(x, x));
  }
}

template <int Step = kLanes / 2>
float largest(Floats x) {
  if constexpr (Step == 0) {
    return x[0];
  } else {
    return largest<Step / 2>(larger(lower<Step>(x, x), upper<Step>(x, x)));
  }
}

// e^x to 2e-7 of it; 0 where that is no normal number, and never more than 1.7e38.
inline Floats exponential(Floats x) {
  Floats scaled = x * 1.44269504f;
  scaled = scaled > 127.0f ? all(127.0f) : scaled;
  // Adding it leaves no bits for a fraction.
  constexpr float kRounder = 12582912.0f;
  const Floats whole = (scaled + kRounder) - kRounder;
  const Floats rest = scaled - whole;
  Floats power = all(1.5403530e-4f);
  power = power * rest + 1.3333558e-3f;
  power = power * rest + 9.6181291e-3f;
  power = power * rest + 5.5504109e-2f;
  power = power * rest + 2.4022651e-1f;
  power = power * rest + 6.9314718e-1f;
  power = power * rest + 1.0f;
  const Ints exponent = __builtin_convertvector(whole, Ints) + 127;
  return scaled < -126.0f ? Floats{} : power * (Floats)(exponent << 23);
}

inline Floats hyperbolic_tangent(Floats x) { return 1.0f - 2.0f / (exponential(x * 2.0f) + 1.0f); }

}  // namespace streamserve

// What lies between the matrix products of a decoder layer. All is computed in float32 and rounded once.
#pragma once

#include <algorithm>
#include <cmath>

#include "vector.h"

namespace streamserve {

// Calls f(at, width) for each vector of a row; only the last is narrower.
template <typename F>
void for_vectors(int size, const F& f) {
  for (int at = 0; at < size; at += kLanes) f(at, std::min(kLanes, size - at));
}

// What a row is multiplied by so that the mean of its squares is 1.
template <typename T>
float inverse_rms(const T* row, int size, float epsilon) {
  Floats squares = {};
  for_vectors(size, [&](int at, int width) {
    const Floats x = load_some(row + at, width);
    squares += x * x;
  });
  return 1.0f / std::sqrt(sum(squares) / float(size) + epsilon);
}

template <typename T>
void normalise(const T* row, const T* weight, int size, float epsilon, T* to) {
  const float factor = inverse_rms(row, size, epsilon);
  for_vectors(size, [&](int at, int width) {
    store_some(to + at, load_some(row + at, width) * factor * load_some(weight + at, width), width);
  });
}

// row += delta
template <typename T>
void add(T* row, const T* delta, int size) {
  for_vectors(size, [&](int at, int width) {
    store_some(row + at, load_some(row + at, width) + load_some(delta + at, width), width);
  });
}

// silu(gate) * up, of a row that has all of gate and then all of up.
template <typename T>
void apply_gate(const T* gate_up, int size, T* to) {
  for_vectors(size, [&](int at, int width) {
    const Floats gate = load_some(gate_up + at, width), up = load_some(gate_up + size + at, width);
    store_some(to + at, gate / (1.0f + exponential(-gate)) * up, width);
  });
}

// Turns a head in place: pairs of its first and second half by the angles of cos and sin. The sines of the first
// half have the other sign. weight: of the norm that comes before, or null.
template <typename T>
void turn_head(T* head, const T* cosines, const T* signed_sines, const T* weight, int size, float epsilon) {
  const int half = size / 2;
  const float factor = weight == nullptr ? 1.0f : inverse_rms(head, size, epsilon);
  for_vectors(half, [&](int at, int width) {
    Floats first = load_some(head + at, width), second = load_some(head + half + at, width);
    if (weight != nullptr) {
      first = first * factor * load_some(weight + at, width);
      second = second * factor * load_some(weight + half + at, width);
    }
    const auto turned = [&](Floats own, Floats other, int from) {
      return own * load_some(cosines + from, width) + other * load_some(signed_sines + from, width);
    };
    store_some(head + at, turned(first, second, at), width);
    store_some(head + half + at, turned(second, first, half + at), width);
  });
}

}  // namespace streamserve

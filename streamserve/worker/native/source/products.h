// Products of small groups of rows with keys and values. A group is of up to four rows, so that what is loaded and
// widened once serves all of them; their count is a template argument, so that sums stay in registers.
#pragma once

#include "vector.h"

namespace streamserve {

constexpr int kMostRows = 4;

// Calls f with a compile-time number, 1 to 4, for a count that is not larger than that.
template <typename F>
void with_count(int count, const F& f) {
  switch (count) {
    case 1: return f(std::integral_constant<int, 1>());
    case 2: return f(std::integral_constant<int, 2>());
    case 3: return f(std::integral_constant<int, 3>());
    default: return f(std::integral_constant<int, 4>());
  }
}

// scores[row][j] of kLanes keys, where they are.
//
// rows: float32 [Rows][padded], zeros behind dim. offsets: of the kLanes keys from `keys`. scores: [Rows][Tile].
template <int Rows, int Tile, typename T>
void scores_in_place(const float* rows, int dim, int padded, const T* keys, const int64_t* offsets, float* scores) {
  // Four keys at a time: more sums than that do not stay in registers.
  constexpr int kKeys = 4, kParts = kLanes / kKeys;
  Floats parts[Rows][kParts];
  for (int part = 0; part < kParts; ++part) {
    Floats dots[Rows][kKeys] = {};
    const T* key[kKeys];
    for (int j = 0; j < kKeys; ++j) key[j] = keys + offsets[part * kKeys + j];
    const auto multiply = [&](int at, const Floats* x) {
      for (int row = 0; row < Rows; ++row) {
        const Floats query = load(rows + row * padded + at);
        for (int j = 0; j < kKeys; ++j) dots[row][j] += query * x[j];
      }
    };
    int at = 0;
    for (; at + kLanes <= dim; at += kLanes) {
      Floats x[kKeys];
      for (int j = 0; j < kKeys; ++j) x[j] = load(key[j] + at);
      multiply(at, x);
    }
    if (at < dim) {
      Floats x[kKeys];
      for (int j = 0; j < kKeys; ++j) x[j] = load_some(key[j] + at, dim - at);
      multiply(at, x);
    }
    for (int row = 0; row < Rows; ++row) parts[row][part] = sums<kKeys>(dots[row]);
  }
  for (int row = 0; row < Rows; ++row) {
    if constexpr (kParts == 4) {
      store(scores + row * Tile, fold<1>(fold<2>(parts[row][0], parts[row][1]), fold<2>(parts[row][2], parts[row][3])));
    } else if constexpr (kParts == 2) {
      store(scores + row * Tile, fold<1>(parts[row][0], parts[row][1]));
    } else {
      store(scores + row * Tile, parts[row][0]);
    }
  }
}

// sums[row] += weights[row][j] * values[j], over `Wide` vectors of a row of values.
//
// weights: [Rows][Tile]. value(j): where the numbers of value j begin. sums: [Rows][padded].
template <int Rows, int Tile, int Wide, typename Value>
void add_weighted(const float* weights, int first, int end, const Value& value, float* sums, int padded) {
  Floats total[Rows][Wide];
  for (int row = 0; row < Rows; ++row)
    for (int i = 0; i < Wide; ++i) total[row][i] = load(sums + row * padded + i * kLanes);
  for (int j = first; j < end; ++j) {
    const auto* from = value(j);
    Floats x[Wide];
    for (int i = 0; i < Wide; ++i) x[i] = load(from + i * kLanes);
    for (int row = 0; row < Rows; ++row) {
      const Floats weight = all(weights[row * Tile + j]);
      for (int i = 0; i < Wide; ++i) total[row][i] += weight * x[i];
    }
  }
  for (int row = 0; row < Rows; ++row)
    for (int i = 0; i < Wide; ++i) store(sums + row * padded + i * kLanes, total[row][i]);
}

// The same over whole rows of `dim` numbers. value(j): where row j of the values begins.
template <int Rows, int Tile, typename Value>
void add_all_weighted(const float* weights, int first, int end, const Value& value, float* sums, int dim, int padded) {
  int at = 0;
  const auto from_here = [&](int j) { return value(j) + at; };
  for (; at + kWide * kLanes <= dim; at += kWide * kLanes)
    add_weighted<Rows, Tile, kWide>(weights, first, end, from_here, sums + at, padded);
  for (; at + kLanes <= dim; at += kLanes)
    add_weighted<Rows, Tile, 1>(weights, first, end, from_here, sums + at, padded);
  if (at == dim) return;
  for (int j = first; j < end; ++j) {
    const Floats x = load_some(value(j) + at, dim - at);
    for (int row = 0; row < Rows; ++row) {
      float* to = sums + row * padded + at;
      store(to, load(to) + weights[row * Tile + j] * x);
    }
  }
}

// scores[row][j] of a tile of packed keys. keys: float32 [dim][Tile], a number of all keys after the other.
template <int Rows, int Tile>
void scores_of_packed(const float* rows, int dim, int padded, const float* keys, float* scores) {
  for (int at = 0; at < Tile; at += kWide * kLanes) {
    Floats total[Rows][kWide] = {};
    for (int d = 0; d < dim; ++d) {
      Floats x[kWide];
      for (int i = 0; i < kWide; ++i) x[i] = load(keys + d * Tile + at + i * kLanes);
      for (int row = 0; row < Rows; ++row) {
        const Floats query = all(rows[row * padded + d]);
        for (int i = 0; i < kWide; ++i) total[row][i] += query * x[i];
      }
    }
    for (int row = 0; row < Rows; ++row)
      for (int i = 0; i < kWide; ++i) store(scores + row * Tile + at + i * kLanes, total[row][i]);
  }
}

}  // namespace streamserve

// Several query tokens of a request, of one KV head, over all keys that they see.
//
// Every tile of keys and values is widened to float32 once and serves all rows of the part.
#pragma once

#include "attention.h"

namespace streamserve {

// Keys that are widened at a time.
constexpr int kTile = 64;

// keys: [dim][kTile], so that a vector has one number of many keys. values: [kTile][padded].
template <typename T>
void pack(const Step<T>& step, int kv_head, const int64_t* offsets, int count, float* keys, float* values) {
  const int padded = step.padded_dim(), dim = step.head_dim;
  for (int j = 0; j < count; ++j) {
    const T* key = step.keys + offsets[j] + kv_head * dim;
    const T* value = step.values + offsets[j] + kv_head * dim;
    for (int at = 0; at < dim; at += kLanes) {
      const int width = std::min(kLanes, dim - at);
      const Floats x = load_some(key + at, width);
      for (int i = 0; i < width; ++i) keys[(at + i) * kTile + j] = x[i];
      store(values + j * padded + at, load_some(value + at, width));
    }
  }
}

// Adds what a packed tile, whose first key is at `key`, has to say to one to four rows from `first` on.
template <int Rows, typename T>
void attend_packed(const Step<T>& step, const Part& part, int first, int key, int count, Scratch& scratch) {
  const int padded = step.padded_dim(), group = step.group();
  float* scores = scratch.scores.data();
  float* sums = &scratch.sums[first * padded];
  int begins[Rows], ends[Rows], begin = kTile, end = 0;
  for (int row = 0; row < Rows; ++row) {
    const int position = step.position(part.request, part.first_query + (first + row) / group);
    begins[row] = std::clamp(step.first_visible(position) - key, 0, kTile);
    ends[row] = std::clamp(position + 1 - key, 0, count);
    begin = std::min(begin, begins[row]);
    end = std::max(end, ends[row]);
  }
  if (begin >= end) return;
  scores_of_packed<Rows, kTile>(&scratch.rows[first * padded], step.head_dim, padded, scratch.keys.data(), scores);
  for (int row = 0; row < Rows; ++row) {
    RowState& state = scratch.states[first + row];
    const int seen = whole_vectors(end);
    const float factor = soften(scores + row * kTile, seen, std::min(begins[row], seen), ends[row], step.soft_cap, state);
    multiply(sums + row * padded, padded, factor);
  }
  const auto value = [&](int j) { return &scratch.values[j * padded]; };
  add_all_weighted<Rows, kTile>(scores, begin, end, value, sums, padded, padded);
}

template <typename T>
void attend_chunk(const Step<T>& step, const Part& part, Scratch& scratch) {
  const int padded = step.padded_dim(), num_rows = part.num_queries * step.group();
  scratch.rows.resize(num_rows * padded);
  scratch.scores.resize(kMostRows * kTile);
  scratch.keys.resize(step.head_dim * kTile);
  scratch.values.assign(kTile * padded, 0.0f);
  scratch.sums.assign(num_rows * padded, 0.0f);
  scratch.states.assign(num_rows, RowState());
  load_rows(step, part, scratch.rows.data());
  int64_t offsets[kTile];
  for (int key = part.first_key; key < part.end_key; key += kTile) {
    const int count = std::min(kTile, part.end_key - key);
    locate(step, part.request, key, count, offsets);
    pack(step, part.first_kv_head, offsets, count, scratch.keys.data(), scratch.values.data());
    for (int row = 0; row < num_rows; row += kMostRows)
      with_count(num_rows - row, [&](auto rows) { attend_packed<rows>(step, part, row, key, count, scratch); });
  }
  write_rows(step, part, scratch.sums.data(), scratch.states.data());
}

}  // namespace streamserve

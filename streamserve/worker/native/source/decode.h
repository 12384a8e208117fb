// One query token of a request, over some of its keys, which are read where they are.
//
// There is little to compute for a number read, so memory must never wait for the processor: what comes next is
// fetched meanwhile, the values while their keys are at work, and the next keys while the values are.
#pragma once

#include "attention.h"

namespace streamserve {

// Keys of a part at most; a part begins where its split begins, or its window.
constexpr int kSplit = 256;

// Keys and values of a head in a part, where they are.
template <typename T>
struct Located {
  const T* keys;
  const T* values;
  const int64_t* offsets;
  int count;
};

// Has the numbers at from[offsets[i]] fetched, `dim` each, without waiting for them. A line too many does no harm.
template <typename T>
void fetch(const T* from, const int64_t* offsets, int num_rows, int dim) {
  constexpr int kLine = 64 / sizeof(T);
  for (int row = 0; row < num_rows; ++row) {
    const T* numbers = from + offsets[row];
    __builtin_prefetch(numbers);
    __builtin_prefetch(numbers + kLine);
    for (int at = 2 * kLine; at < dim; at += kLine) __builtin_prefetch(numbers + at);
  }
}

// What one to four rows find at the keys of a head. `next_keys` are of the same tokens, and wanted next.
template <int Rows, typename T>
void attend_rows(const Step<T>& step, const float* rows, const Located<T>& head, const T* next_keys, float* scores,
                 float* sums, RowState* states) {
  const int padded = step.padded_dim(), dim = step.head_dim;
  for (int at = 0; at < head.count; at += kLanes) {
    fetch(head.values, head.offsets + at, kLanes, dim);
    scores_in_place<Rows, kSplit>(rows, dim, padded, head.keys, head.offsets + at, scores + at);
  }
  for (int row = 0; row < Rows; ++row)
    soften(scores + row * kSplit, whole_vectors(head.count), 0, head.count, step.soft_cap, states[row]);
  const auto value = [&](int j) { return head.values + head.offsets[j]; };
  for (int at = 0; at < head.count; at += kLanes) {
    if (next_keys != nullptr) fetch(next_keys, head.offsets + at, kLanes, dim);
    add_all_weighted<Rows, kSplit>(scores, at, std::min(head.count, at + kLanes), value, sums, dim, padded);
  }
}

// sums: [KV heads of the part * group][padded_dim] and as many states, as they begin.
template <typename T>
void attend_decode(const Step<T>& step, const Part& part, Scratch& scratch, float* sums, RowState* states) {
  const int padded = step.padded_dim(), dim = step.head_dim, group = step.group();
  scratch.rows.resize(part.num_kv_heads * group * padded);
  scratch.scores.resize(kMostRows * kSplit);
  load_rows(step, part, scratch.rows.data());
  int64_t offsets[kSplit];
  const int count = part.end_key - part.first_key;
  locate(step, part.request, part.first_key, count, offsets);
  for (int index = 0; index < part.num_kv_heads; ++index) {
    const int kv_head = part.first_kv_head + index;
    const Located<T> head = {step.keys + kv_head * dim, step.values + kv_head * dim, offsets, count};
    const T* next_keys = index + 1 < part.num_kv_heads ? head.keys + dim : nullptr;
    for (int member = 0; member < group; member += kMostRows) {
      const int row = index * group + member;
      with_count(group - member, [&](auto rows) {
        attend_rows<rows>(step, &scratch.rows[row * padded], head, next_keys, scratch.scores.data(),
                          sums + row * padded, states + row);
      });
    }
  }
}

}  // namespace streamserve

// What every kernel of attention over the paged KV cache is told, and the parts that they share.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "products.h"

namespace streamserve {

inline int whole_vectors(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

// One layer's attention in one step. Rows of q and out are tokens; all rows of a head have head_dim numbers.
template <typename T>
struct Step {
  const T* q;
  T* out;
  const T* keys;    // [num_blocks, block_size, num_kv_heads, head_dim]
  const T* values;  // alike
  int64_t q_stride, out_stride;
  int num_heads, num_kv_heads, head_dim, block_size;
  const int32_t* block_tables;  // [slots, table_width]
  int64_t table_width;
  const int32_t* slots;        // [num_requests]
  const int32_t* query_start;  // [num_requests + 1]
  const int32_t* context;      // [num_requests], keys that the last query token sees
  int num_requests;
  int window;  // keys that a query token sees; 0 is all
  float soft_cap, scale;

  int group() const { return num_heads / num_kv_heads; }
  int padded_dim() const { return whole_vectors(head_dim); }
  int num_queries(int request) const { return query_start[request + 1] - query_start[request]; }
  // Position of a query token is where its own key is.
  int position(int request, int query) const { return context[request] - num_queries(request) + query; }
  int first_visible(int position) const { return window > 0 ? std::max(0, position + 1 - window) : 0; }
};

// Part of a step that one thread does: some query tokens of a request, some KV heads, keys [first_key, end_key).
struct Part {
  int request;
  int first_query, num_queries;
  int first_key, end_key;
  int first_kv_head, num_kv_heads;
  bool is_decode;  // of a request with one query token
};

// Online softmax of a row.
struct RowState {
  float most = kMinusInfinity;
  float total = 0;
};

// What a thread works in; it keeps the memory for the next step.
struct Scratch {
  std::vector<float> rows, sums, scores, keys, values;
  std::vector<RowState> states;
};

// Sets `offsets` of keys [first, first + count), with the last one again up to a whole vector.
template <typename T>
void locate(const Step<T>& step, int request, int first, int count, int64_t* offsets) {
  const int32_t* table = step.block_tables + step.slots[request] * step.table_width;
  const int64_t row = int64_t(step.num_kv_heads) * step.head_dim;
  int index = first / step.block_size, within = first % step.block_size;
  for (int j = 0; j < count; ++j) {
    offsets[j] = (int64_t(table[index]) * step.block_size + within) * row;
    if (++within == step.block_size) {
      within = 0;
      ++index;
    }
  }
  std::fill(offsets + count, offsets + whole_vectors(count), offsets[count - 1]);
}

// Turns scores [count], whole vectors, into weights, of which those outside [first, end) are 0, and takes them into
// the state. Returns what earlier sums are to be multiplied by.
inline float soften(float* scores, int count, int first, int end, float soft_cap, RowState& state) {
  if (soft_cap > 0)
    for (int at = 0; at < count; at += kLanes)
      store(scores + at, soft_cap * hyperbolic_tangent(load(scores + at) / soft_cap));
  std::fill(scores, scores + first, kMinusInfinity);
  std::fill(scores + end, scores + count, kMinusInfinity);
  Floats most = all(kMinusInfinity);
  for (int at = 0; at < count; at += kLanes) most = larger(most, load(scores + at));
  const float before = state.most;
  state.most = std::max(before, largest(most));
  if (state.most == kMinusInfinity) {
    std::fill(scores, scores + count, 0.0f);
    return 1.0f;
  }
  Floats total = {};
  for (int at = 0; at < count; at += kLanes) {
    const Floats weights = exponential(load(scores + at) - state.most);
    store(scores + at, weights);
    total += weights;
  }
  const float factor = before == kMinusInfinity ? 0.0f : std::exp(before - state.most);
  state.total = state.total * factor + sum(total);
  return factor;
}

inline void multiply(float* row, int padded, float factor) {
  if (factor == 1.0f) return;
  for (int at = 0; at < padded; at += kLanes) store(row + at, load(row + at) * factor);
}

// The query rows of a part in float32, multiplied by the scale: [KV head of the part][query][head of the group].
template <typename T>
void load_rows(const Step<T>& step, const Part& part, float* rows) {
  const int padded = step.padded_dim(), dim = step.head_dim, group = step.group();
  for (int head = 0; head < part.num_kv_heads; ++head) {
    for (int query = 0; query < part.num_queries; ++query) {
      const T* token = step.q + (step.query_start[part.request] + part.first_query + query) * step.q_stride;
      for (int member = 0; member < group; ++member, rows += padded) {
        const T* from = token + ((part.first_kv_head + head) * group + member) * dim;
        for (int at = 0; at < padded; at += kLanes)
          store(rows + at, load_some(from + at, std::min(kLanes, dim - at)) * step.scale);
      }
    }
  }
}

// Writes rows, each divided by its total, to where they belong in out; the order is that of `load_rows`.
template <typename T>
void write_rows(const Step<T>& step, const Part& part, const float* sums, const RowState* states) {
  const int padded = step.padded_dim(), dim = step.head_dim, group = step.group();
  for (int head = 0; head < part.num_kv_heads; ++head) {
    for (int query = 0; query < part.num_queries; ++query) {
      T* token = step.out + (step.query_start[part.request] + part.first_query + query) * step.out_stride;
      for (int member = 0; member < group; ++member, sums += padded, ++states) {
        T* to = token + ((part.first_kv_head + head) * group + member) * dim;
        for (int at = 0; at < padded; at += kLanes)
          store_some(to + at, load(sums + at) / states->total, std::min(kLanes, dim - at));
      }
    }
  }
}

}  // namespace streamserve

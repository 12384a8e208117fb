// Cuts a step into parts and has threads do them.
//
// A request that decodes is cut into splits of its keys, at fixed positions; what they find is joined in their order.
// A request with several query tokens is cut into tiles of queries. So a request is computed alike whatever else is
// in the step and however many threads there are: company decides only who does which part.
#pragma once

#include <atomic>
#include <memory>

#include "chunk.h"
#include "decode.h"

namespace streamserve {

// Query tokens times query heads of a KV head in a tile: enough that widening a tile of keys costs little.
constexpr int kTileRows = 128;
// Parts for each thread below which the KV heads of a decode are parts of their own.
constexpr int kFewParts = 4;
// Scores of a step below which no second thread is woken.
constexpr int64_t kLeastShared = 1 << 13;

// Neighbouring parts that are the splits of the same rows.
struct Splits {
  int first_part, count;
};

struct Plan {
  std::vector<Part> parts;
  std::vector<Splits> joints;
  std::vector<int> joint_of;    // of each part; -1 writes to out by itself
  std::vector<float> found;     // sums of all parts that are joined
  std::vector<RowState> states;
  std::vector<int64_t> row_of;  // of each part, its first row in `found` and `states`
  int64_t num_scores = 0;
};

template <typename T>
int64_t count_splits(const Step<T>& step) {
  int64_t count = 0;
  for (int request = 0; request < step.num_requests; ++request)
    if (step.num_queries(request) == 1) count += (step.context[request] + kSplit - 1) / kSplit;
  return count;
}

template <typename T>
void plan_decode(const Step<T>& step, int request, int heads_a_part, int64_t& num_rows, Plan& plan) {
  const int end = step.context[request], begin = step.first_visible(end - 1);
  const int first = begin / kSplit, last = (end - 1) / kSplit;
  for (int head = 0; head < step.num_kv_heads; head += heads_a_part) {
    const int joint = first == last ? -1 : int(plan.joints.size());
    if (joint >= 0) plan.joints.push_back({int(plan.parts.size()), last - first + 1});
    for (int split = first; split <= last; ++split) {
      const int from = std::max(begin, split * kSplit), to = std::min(end, (split + 1) * kSplit);
      plan.parts.push_back({request, 0, 1, from, to, head, heads_a_part, true});
      plan.joint_of.push_back(joint);
      plan.row_of.push_back(num_rows);
      num_rows += joint < 0 ? 0 : heads_a_part * step.group();
    }
  }
  plan.num_scores += int64_t(end - begin) * step.num_heads;
}

template <typename T>
void plan_chunk(const Step<T>& step, int request, Plan& plan) {
  const int num_queries = step.num_queries(request), tile = std::max(1, kTileRows / step.group());
  for (int head = 0; head < step.num_kv_heads; ++head) {
    // The last tile sees most keys, so it is begun first.
    for (int query = (num_queries - 1) / tile * tile; query >= 0; query -= tile) {
      const int count = std::min(tile, num_queries - query);
      const int from = step.first_visible(step.position(request, query));
      const int to = step.position(request, query + count - 1) + 1;
      plan.parts.push_back({request, query, count, from, to, head, 1, false});
      plan.joint_of.push_back(-1);
      plan.row_of.push_back(0);
      plan.num_scores += int64_t(count) * (to - from) * step.group();
    }
  }
}

template <typename T>
void make_plan(const Step<T>& step, int num_threads, Plan& plan) {
  plan.parts.clear();
  plan.joints.clear();
  plan.joint_of.clear();
  plan.row_of.clear();
  plan.num_scores = 0;
  int64_t num_rows = 0;
  const bool is_few = count_splits(step) < int64_t(kFewParts) * num_threads;
  for (int request = 0; request < step.num_requests; ++request) {
    const int num_queries = step.num_queries(request);
    if (num_queries > 1) plan_chunk(step, request, plan);
    if (num_queries == 1) plan_decode(step, request, is_few ? 1 : step.num_kv_heads, num_rows, plan);
  }
  plan.found.resize(num_rows * step.padded_dim());
  plan.states.resize(num_rows);
}

// What the splits of some rows found, made one and written to out.
template <typename T>
void join(const Step<T>& step, const Splits& splits, const Plan& plan, Scratch& scratch) {
  const Part& part = plan.parts[splits.first_part];
  const int padded = step.padded_dim(), num_rows = part.num_kv_heads * step.group();
  scratch.sums.assign(num_rows * padded, 0.0f);
  scratch.states.assign(num_rows, RowState());
  for (int row = 0; row < num_rows; ++row) {
    RowState& state = scratch.states[row];
    for (int i = 0; i < splits.count; ++i)
      state.most = std::max(state.most, plan.states[plan.row_of[splits.first_part + i] + row].most);
    float* sums = &scratch.sums[row * padded];
    for (int i = 0; i < splits.count; ++i) {
      const int64_t from = plan.row_of[splits.first_part + i] + row;
      const float share = std::exp(plan.states[from].most - state.most);
      state.total += share * plan.states[from].total;
      for (int at = 0; at < padded; at += kLanes)
        store(sums + at, load(sums + at) + share * load(&plan.found[from * padded + at]));
    }
  }
  write_rows(step, part, scratch.sums.data(), scratch.states.data());
}

// Does one part, and what can be done once it is there.
template <typename T>
void do_part(const Step<T>& step, int index, Plan& plan, std::atomic<int>* missing, Scratch& scratch) {
  const Part& part = plan.parts[index];
  if (!part.is_decode) return attend_chunk(step, part, scratch);
  const int padded = step.padded_dim(), num_rows = part.num_kv_heads * step.group(), joint = plan.joint_of[index];
  if (joint < 0) {
    scratch.sums.assign(num_rows * padded, 0.0f);
    scratch.states.assign(num_rows, RowState());
    attend_decode(step, part, scratch, scratch.sums.data(), scratch.states.data());
    return write_rows(step, part, scratch.sums.data(), scratch.states.data());
  }
  float* sums = &plan.found[plan.row_of[index] * padded];
  RowState* states = &plan.states[plan.row_of[index]];
  std::fill(sums, sums + num_rows * padded, 0.0f);
  std::fill(states, states + num_rows, RowState());
  attend_decode(step, part, scratch, sums, states);
  // Whoever brings the last of the splits joins them all.
  if (missing[joint].fetch_sub(1, std::memory_order_acq_rel) == 1) join(step, plan.joints[joint], plan, scratch);
}

// run(count, body): calls body() on `count` threads, the own one among them.
template <typename T, typename Run>
void attend(const Step<T>& step, int num_threads, const Run& run) {
  static thread_local Plan plan_of_thread;
  Plan& plan = plan_of_thread;
  make_plan(step, num_threads, plan);
  const int num_parts = int(plan.parts.size());
  const auto missing = std::make_unique<std::atomic<int>[]>(plan.joints.size());
  for (size_t joint = 0; joint < plan.joints.size(); ++joint) missing[joint] = plan.joints[joint].count;
  std::atomic<int> next{0};
  const auto body = [&] {
    static thread_local Scratch scratch;
    for (int part; (part = next.fetch_add(1)) < num_parts;) do_part(step, part, plan, missing.get(), scratch);
  };
  run(plan.num_scores < kLeastShared ? 1 : std::min(num_threads, num_parts), body);
}

}  // namespace streamserve

// Registers the kernels with torch, through its stable interface: a build fits later versions of torch too, and
// the threads are torch's own.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "layer.h"
#include "plan.h"

namespace streamserve {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

bool is_bfloat16(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::BFloat16 || tensor.scalar_type() == ScalarType::Float,
                  "the kernels take bfloat16 and float32");
  return tensor.scalar_type() == ScalarType::BFloat16;
}

template <typename F>
void on_threads(int count, const F& body) {
  if (count <= 1) return body();
  torch::stable::parallel_for(0, count, 1, [&](int64_t, int64_t) { body(); });
}

// [tokens, heads, head_dim] such that a token's numbers lie one after the other, as they do except where a compiler
// has laid them out.
Tensor with_whole_rows(const Tensor& rows) {
  const bool is_whole = rows.stride(2) == 1 && (rows.stride(1) == rows.size(2) || rows.size(1) == 1);
  return is_whole ? rows : torch::stable::contiguous(rows);
}

// Copies rows [tokens, heads, head_dim], whose tokens may be strided, to their slots of a layer's cache.
void store_rows(const Tensor& from, const Tensor& cache, const Tensor& slot_mapping) {
  const int64_t size = from.element_size(), width = from.size(1) * from.size(2) * size;
  const int64_t stride = from.stride(0) * size;
  const char* rows = data<const char>(from);
  char* to = data<char>(cache);
  const int64_t* slots = data<const int64_t>(slot_mapping);
  // A copy is done before another thread is awake, unless there are many.
  constexpr int64_t kRows = 64;
  torch::stable::parallel_for(0, from.size(0), kRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      if (slots[row] >= 0) std::memcpy(to + slots[row] * width, rows + row * stride, width);
  });
}

template <typename T>
void attend_with(const Tensor& q, const Tensor& out, const Tensor& keys, const Tensor& values,
                 const Tensor& block_tables, const Tensor& slots, const Tensor& query_start, const Tensor& context,
                 int64_t window, double soft_cap, double scale) {
  Step<T> step;
  step.q = data<const T>(q);
  step.out = data<T>(out);
  step.keys = data<const T>(keys);
  step.values = data<const T>(values);
  step.q_stride = q.stride(0);
  step.out_stride = out.stride(0);
  step.num_heads = int(q.size(1));
  step.num_kv_heads = int(keys.size(2));
  step.head_dim = int(q.size(2));
  step.block_size = int(keys.size(1));
  step.block_tables = data<const int32_t>(block_tables);
  step.table_width = block_tables.size(1);
  step.slots = data<const int32_t>(slots);
  step.query_start = data<const int32_t>(query_start);
  step.context = data<const int32_t>(context);
  step.num_requests = int(slots.size(0));
  step.window = int(window);
  step.soft_cap = float(soft_cap);
  step.scale = float(scale);
  const int num_threads = int(torch::stable::get_num_threads());
  attend(step, num_threads, [](int count, const auto& body) { on_threads(count, body); });
}

void attend_op(Tensor q, Tensor k, Tensor v, Tensor out, Tensor keys, Tensor values, Tensor slot_mapping,
               Tensor block_tables, Tensor slots, Tensor query_start, Tensor context, int64_t window, double soft_cap,
               double scale) {
  STD_TORCH_CHECK(out.stride(1) == 1, "attend writes rows whose numbers lie one after the other");
  q = with_whole_rows(q);
  store_rows(with_whole_rows(k), keys, slot_mapping);
  store_rows(with_whole_rows(v), values, slot_mapping);
  const auto run = is_bfloat16(q) ? attend_with<Bfloat16> : attend_with<float>;
  run(q, out, keys, values, block_tables, slots, query_start, context, window, soft_cap, scale);
}

// Calls f(T()) with the number format of a tensor.
template <typename F>
void with_format(const Tensor& tensor, const F& f) {
  if (is_bfloat16(tensor)) return f(Bfloat16());
  return f(float());
}

// Calls f(row) for all rows of so many numbers, on threads where there are enough of them.
template <typename F>
void for_rows(int64_t count, int64_t size, const F& f) {
  constexpr int64_t kNumbers = 1 << 15;
  torch::stable::parallel_for(0, count, kNumbers / size + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

Tensor rms_norm_op(Tensor x, Tensor weight, double epsilon) {
  STD_TORCH_CHECK(x.is_contiguous(), "rms_norm takes rows that lie one after the other");
  const int64_t size = weight.size(0);
  Tensor out = torch::stable::empty_like(x);
  with_format(x, [&](auto format) {
    using T = decltype(format);
    for_rows(x.numel() / size, size, [&](int64_t row) {
      normalise(data<const T>(x) + row * size, data<const T>(weight), int(size), float(epsilon),
                data<T>(out) + row * size);
    });
  });
  return out;
}

Tensor add_rms_norm_op(Tensor hidden, Tensor delta, Tensor weight, double epsilon) {
  STD_TORCH_CHECK(hidden.is_contiguous() && delta.is_contiguous(), "rms_norm takes rows that lie one after the other");
  const int64_t size = weight.size(0);
  Tensor out = torch::stable::empty_like(hidden);
  with_format(hidden, [&](auto format) {
    using T = decltype(format);
    for_rows(hidden.numel() / size, size, [&](int64_t row) {
      T* own = data<T>(hidden) + row * size;
      add(own, data<const T>(delta) + row * size, int(size));
      normalise(own, data<const T>(weight), int(size), float(epsilon), data<T>(out) + row * size);
    });
  });
  return out;
}

Tensor silu_mul_op(Tensor gate_up) {
  STD_TORCH_CHECK(gate_up.is_contiguous(), "silu_mul takes rows that lie one after the other");
  const int64_t count = gate_up.size(0), size = gate_up.size(1) / 2;
  Tensor out = torch::stable::new_empty(gate_up, {count, size});
  with_format(gate_up, [&](auto format) {
    using T = decltype(format);
    for_rows(count, size, [&](int64_t row) {
      apply_gate(data<const T>(gate_up) + row * 2 * size, int(size), data<T>(out) + row * size);
    });
  });
  return out;
}

void turn_op(Tensor heads, Tensor cosines, Tensor signed_sines, std::optional<Tensor> q_norm,
             std::optional<Tensor> k_norm, int64_t num_heads, int64_t num_kv_heads, double epsilon) {
  STD_TORCH_CHECK(heads.is_contiguous() && cosines.is_contiguous() && signed_sines.is_contiguous(),
                  "turn takes rows that lie one after the other");
  const int64_t width = heads.size(1), size = heads.size(2), num_turned = num_heads + num_kv_heads;
  with_format(heads, [&](auto format) {
    using T = decltype(format);
    const T* q_weight = q_norm ? data<const T>(*q_norm) : nullptr;
    const T* k_weight = k_norm ? data<const T>(*k_norm) : nullptr;
    for_rows(heads.size(0), num_turned * size, [&](int64_t row) {
      const T* cosine = data<const T>(cosines) + row * size;
      const T* sine = data<const T>(signed_sines) + row * size;
      for (int64_t head = 0; head < num_turned; ++head)
        turn_head(data<T>(heads) + (row * width + head) * size, cosine, sine, head < num_heads ? q_weight : k_weight,
                  int(size), float(epsilon));
    });
  });
}

}  // namespace streamserve

#ifndef STREAMSERVE_NAMESPACE
#define STREAMSERVE_NAMESPACE streamserve_cpu
#endif

STABLE_TORCH_LIBRARY(STREAMSERVE_NAMESPACE, library) {
  library.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) keys, Tensor(c!) values, "
      "Tensor slot_mapping, Tensor block_tables, Tensor slots, Tensor query_start, Tensor context, int window, "
      "float soft_cap, float scale) -> ()");
  library.def("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor");
  library.def("add_rms_norm(Tensor(a!) hidden, Tensor delta, Tensor weight, float epsilon) -> Tensor");
  library.def("silu_mul(Tensor gate_up) -> Tensor");
  library.def(
      "turn(Tensor(a!) heads, Tensor cosines, Tensor signed_sines, Tensor? q_norm, Tensor? k_norm, int num_heads, "
      "int num_kv_heads, float epsilon) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(STREAMSERVE_NAMESPACE, CPU, library) {
  library.impl("attend", TORCH_BOX(&streamserve::attend_op));
  library.impl("rms_norm", TORCH_BOX(&streamserve::rms_norm_op));
  library.impl("add_rms_norm", TORCH_BOX(&streamserve::add_rms_norm_op));
  library.impl("silu_mul", TORCH_BOX(&streamserve::silu_mul_op));
  library.impl("turn", TORCH_BOX(&streamserve::turn_op));
}

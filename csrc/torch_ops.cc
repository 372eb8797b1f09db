// PyTorch's view of the kernels: arguments checked, payloads allocated, threads lent. hvd_quant/ops/torch.py is the caller.
//
// Decoders return what is wrong with the payloads as a sentence, empty if nothing is: PyTorch would turn every C++
// exception into the same RuntimeError, and a damaged payload must be told from a wrong argument.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>
#include <torch/version.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/cast.h"
#include "kernels/fields.h"
#include "kernels/measure.h"
#include "kernels/onebit.h"
#include "kernels/sparse.h"

namespace {

using at::Tensor;
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 2
using Residual = c10::optional<Tensor>;  // the dispatcher does not know std::optional yet
#else
using Residual = std::optional<Tensor>;
#endif
using hvd_quant::Bytes;
using hvd_quant::Cast;
using hvd_quant::Code;
using hvd_quant::Fields;
using hvd_quant::SparseLayout;
using hvd_quant::at_random;

hvd_quant::Parallel threads() {
  hvd_quant::Parallel parallel;
#ifdef INTRA_OP_PARALLEL  // at::parallel_for is a header and does nothing in parallel when compiled without -fopenmp
  parallel.threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  parallel.run = [](int64_t n, int64_t grain, const hvd_quant::Range& body) { at::parallel_for(0, n, grain, body); };
#endif
  return parallel;
}

void check_vector(const Tensor& t, const char* name, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(t.device().is_cpu(), name, " is on ", t.device(), ", expected a CPU tensor");
  TORCH_CHECK_VALUE(t.scalar_type() == dtype, name, " is ", t.scalar_type(), ", expected ", dtype);
  TORCH_CHECK_VALUE(t.dim() == 1, name, " has ", t.dim(), " dimensions, expected a flat vector: pass ", name, ".view(-1)");
  TORCH_CHECK_VALUE(t.is_contiguous(), name, " has stride ", t.stride(0), ", expected a contiguous vector");
}

// The gradient's and the residual's memory; the latter may be null.
std::tuple<const float*, float*> state(const Tensor& grad, const Residual& residual) {
  check_vector(grad, "grad", at::kFloat);
  if (!residual) return {grad.const_data_ptr<float>(), nullptr};
  check_vector(*residual, "residual", at::kFloat);
  TORCH_CHECK_VALUE(residual->numel() == grad.numel(), "residual has ", residual->numel(),
                    " entries, expected as many as grad: ", grad.numel());
  return {grad.const_data_ptr<float>(), residual->mutable_data_ptr<float>()};
}

Tensor empty_payload(int64_t nbytes) { return at::empty({nbytes}, at::TensorOptions(at::kByte)); }

void check_block_size(int64_t block_size) {
  TORCH_CHECK_VALUE(block_size > 0 && block_size % 64 == 0, "block_size is ", block_size,
                    ", expected a positive multiple of 64");
}

void check_slots(int64_t slots) {
  TORCH_CHECK_VALUE(slots > 0 && slots % 8 == 0 && slots < int64_t{1} << 32, "slots is ", slots,
                    ", expected a positive multiple of 8 below 2^32");
}

void check_ratio(double ratio) { TORCH_CHECK_VALUE(ratio > 0 && ratio <= 1, "ratio is ", ratio, ", expected 0 < ratio <= 1"); }

std::tuple<float, float> beyond(const Tensor& thresholds) {
  const hvd_quant::DenormalGuard guard;  // the smallest threshold is a denormal
  check_vector(thresholds, "thresholds", at::kFloat);
  TORCH_CHECK_VALUE(thresholds.numel() == 2, "thresholds has ", thresholds.numel(), " entries, expected 2");
  const float* tau = thresholds.const_data_ptr<float>();
  TORCH_CHECK_VALUE(tau[0] > 0 && tau[1] < 0, "thresholds is (", tau[0], ", ", tau[1],
                    "), expected a positive and a negative one");
  return {tau[0], tau[1]};
}

Code topk_code(const std::string& values) {
  const Code code = hvd_quant::topk_code(values);
  TORCH_CHECK_VALUE(code >= Code::topk, "values is ", values, ", expected ", hvd_quant::kTopkValues);
  return code;
}

std::vector<Bytes> bytes_of(const std::vector<Tensor>& payloads, const Tensor& out) {
  check_vector(out, "out", at::kFloat);
  TORCH_CHECK_VALUE(!payloads.empty(), "there are no payloads, expected one a worker");
  std::vector<Bytes> bytes;
  for (const Tensor& payload : payloads) {
    check_vector(payload, "payload", at::kByte);
    bytes.push_back({payload.const_data_ptr<uint8_t>(), payload.numel()});
  }
  return bytes;
}

template <class Decode>
std::string complaint(const Decode& decode) {
  try {
    decode();
  } catch (const hvd_quant::PayloadError& error) {
    return error.what();
  }
  return "";
}

using Signs = hvd_quant::Signs (*)(int64_t block_size, bool zeros);

template <Signs kind>
Tensor signs_encode(const Tensor& grad, const Residual& residual, int64_t block_size, bool zeros) {
  const auto [g, e] = state(grad, residual);
  check_block_size(block_size);
  const hvd_quant::Signs code = kind(block_size, zeros);
  Tensor payload = empty_payload(hvd_quant::signs_payload_bytes(code, grad.numel()));
  hvd_quant::signs_encode(code, g, e, grad.numel(), payload.mutable_data_ptr<uint8_t>(), threads());
  return payload;
}

template <Signs kind>
std::string signs_decode_sum(const std::vector<Tensor>& payloads, int64_t block_size, bool zeros, double scale,
                             const Tensor& out) {
  const std::vector<Bytes> bytes = bytes_of(payloads, out);
  check_block_size(block_size);
  return complaint([&] {
    hvd_quant::signs_decode_sum(kind(block_size, zeros), bytes, out.numel(), float(scale), out.mutable_data_ptr<float>(),
                                threads());
  });
}

Tensor fields_encode(const Fields& code, const hvd_quant::Rounding& rounding, const Tensor& grad, const Residual& residual) {
  const auto [g, e] = state(grad, residual);
  TORCH_CHECK_VALUE(rounding.first >= 0 && rounding.first % 64 == 0, "first is ", rounding.first,
                    ", expected a multiple of 64");
  Tensor payload = empty_payload(hvd_quant::fields_payload_bytes(code, grad.numel()));
  hvd_quant::fields_encode(code, rounding, g, e, grad.numel(), payload.mutable_data_ptr<uint8_t>(), threads());
  return payload;
}

std::string fields_decode_sum(const Fields& code, const std::vector<Tensor>& payloads, double scale, const Tensor& out) {
  const std::vector<Bytes> bytes = bytes_of(payloads, out);
  return complaint(
      [&] { hvd_quant::fields_decode_sum(code, bytes, out.numel(), float(scale), out.mutable_data_ptr<float>(), threads()); });
}

Fields qsgd_fields(int64_t bits, int64_t block_size) {
  TORCH_CHECK_VALUE(bits == 2 || bits == 4 || bits == 8, "bits is ", bits, ", expected 2, 4 or 8");
  check_block_size(block_size);
  return hvd_quant::qsgd_fields(int(bits), block_size);
}

Tensor qsgd_encode(const Tensor& grad, const Residual& residual, int64_t bits, std::string norm, int64_t block_size,
                   int64_t stream, int64_t first, int64_t step, int64_t rank, int64_t phase) {
  TORCH_CHECK_VALUE(norm == "max" || norm == "l2", "norm is ", norm, ", expected max or l2");
  return fields_encode(qsgd_fields(bits, block_size), at_random({stream, first, step, rank, phase}, norm == "l2"), grad,
                       residual);
}

std::string qsgd_decode_sum(const std::vector<Tensor>& payloads, int64_t bits, int64_t block_size, double scale,
                            const Tensor& out) {
  return fields_decode_sum(qsgd_fields(bits, block_size), payloads, scale, out);
}

Tensor terngrad_measure(const Tensor& grad, const Residual& residual, double clip) {
  const auto [g, e] = state(grad, residual);
  TORCH_CHECK_VALUE(clip >= 0, "clip is ", clip, ", expected a number of standard deviations, 0 for none");
  Tensor largest = at::empty({1}, grad.options());
  *largest.mutable_data_ptr<float>() = hvd_quant::terngrad_measure(g, e, grad.numel(), clip, threads());
  return largest;
}

Tensor terngrad_encode(const Tensor& grad, const Residual& residual, const Tensor& largest, int64_t stream, int64_t first,
                       int64_t step, int64_t rank, int64_t phase) {
  const hvd_quant::DenormalGuard guard;  // it may be a denormal
  check_vector(largest, "largest", at::kFloat);
  TORCH_CHECK_VALUE(largest.numel() == 1, "largest has ", largest.numel(), " entries, expected 1");
  const float scale = *largest.const_data_ptr<float>();
  TORCH_CHECK_VALUE(scale >= 0 && std::isfinite(scale), "largest is ", scale, ", expected a finite number of at least 0");
  return fields_encode(hvd_quant::terngrad_fields(), at_random({stream, first, step, rank, phase}, false, scale), grad,
                       residual);
}

std::string terngrad_decode_sum(const std::vector<Tensor>& payloads, double scale, const Tensor& out) {
  return fields_decode_sum(hvd_quant::terngrad_fields(), payloads, scale, out);
}

Tensor natural_encode(const Tensor& grad, const Residual& residual, int64_t stream, int64_t first, int64_t step, int64_t rank,
                      int64_t phase) {
  return fields_encode(hvd_quant::natural_fields(), at_random({stream, first, step, rank, phase}), grad, residual);
}

std::string natural_decode_sum(const std::vector<Tensor>& payloads, double scale, const Tensor& out) {
  return fields_decode_sum(hvd_quant::natural_fields(), payloads, scale, out);
}

Fields blockwise8_fields(const std::string& code, int64_t block_size) {
  TORCH_CHECK_VALUE(code == "linear" || code == "dynamic", "code is ", code, ", expected linear or dynamic");
  check_block_size(block_size);
  return hvd_quant::blockwise8_fields(code == "dynamic", block_size);
}

Tensor blockwise8_encode(const Tensor& grad, const Residual& residual, std::string code, int64_t block_size) {
  return fields_encode(blockwise8_fields(code, block_size), hvd_quant::to_nearest(), grad, residual);
}

std::string blockwise8_decode_sum(const std::vector<Tensor>& payloads, std::string code, int64_t block_size, double scale,
                                  const Tensor& out) {
  return fields_decode_sum(blockwise8_fields(code, block_size), payloads, scale, out);
}

Tensor sparse_encode(Code code, const Tensor& grad, const Residual& residual, std::tuple<float, float> tau, int64_t slots,
                     int64_t step) {
  const auto [g, e] = state(grad, residual);
  check_slots(slots);
  Tensor payload = empty_payload(SparseLayout(code, grad.numel(), slots).payload_bytes);
  hvd_quant::sparse_encode(code, g, e, grad.numel(), std::get<0>(tau), std::get<1>(tau), slots, step,
                           payload.mutable_data_ptr<uint8_t>(), threads());
  return payload;
}

Tensor threshold_encode(const Tensor& grad, const Residual& residual, double tau, int64_t slots, int64_t step) {
  const hvd_quant::DenormalGuard guard;
  const float t = float(tau);
  TORCH_CHECK_VALUE(t > 0 && std::isfinite(t), "tau is ", tau, ", expected a positive number that fp32 holds");
  return sparse_encode(Code::threshold, grad, residual, {t, -t}, slots, step);
}

Tensor adaptive_encode(const Tensor& grad, const Residual& residual, const Tensor& thresholds, int64_t slots, int64_t step) {
  return sparse_encode(Code::adaptive, grad, residual, beyond(thresholds), slots, step);
}

Tensor topk_encode(const Tensor& grad, const Residual& residual, const Tensor& thresholds, int64_t slots, std::string values,
                   int64_t step) {
  return sparse_encode(topk_code(values), grad, residual, beyond(thresholds), slots, step);
}

std::string sparse_decode_sum(Code code, const std::vector<Tensor>& payloads, int64_t slots, double scale, const Tensor& out) {
  const std::vector<Bytes> bytes = bytes_of(payloads, out);
  check_slots(slots);
  return complaint([&] {
    hvd_quant::sparse_decode_sum(code, bytes, out.numel(), slots, float(scale), out.mutable_data_ptr<float>(), threads());
  });
}

std::string threshold_decode_sum(const std::vector<Tensor>& payloads, int64_t slots, double scale, const Tensor& out) {
  return sparse_decode_sum(Code::threshold, payloads, slots, scale, out);
}

std::string adaptive_decode_sum(const std::vector<Tensor>& payloads, int64_t slots, double scale, const Tensor& out) {
  return sparse_decode_sum(Code::adaptive, payloads, slots, scale, out);
}

std::string topk_decode_sum(const std::vector<Tensor>& payloads, int64_t slots, std::string values, double scale,
                            const Tensor& out) {
  return sparse_decode_sum(topk_code(values), payloads, slots, scale, out);
}

using Measure = void (*)(const float*, const float*, int64_t, double, int64_t, float*);

Tensor measure(Measure kernel, const Tensor& grad, const Residual& residual, double ratio, int64_t step) {
  const auto [g, e] = state(grad, residual);
  check_ratio(ratio);
  Tensor thresholds = at::empty({2}, grad.options());
  kernel(g, e, grad.numel(), ratio, step, thresholds.mutable_data_ptr<float>());
  return thresholds;
}

Tensor topk_measure(const Tensor& grad, const Residual& residual, double ratio, int64_t step) {
  return measure(hvd_quant::topk_measure, grad, residual, ratio, step);
}

Tensor model_measure(const Tensor& grad, const Residual& residual, double ratio, int64_t step, const Tensor& magnitudes,
                     const Tensor& threshold) {
  const auto [g, e] = state(grad, residual);
  check_ratio(ratio);
  const int64_t count = hvd_quant::sample_size(grad.numel());
  check_vector(magnitudes, "magnitudes", at::kFloat);
  TORCH_CHECK_VALUE(magnitudes.numel() == count, "magnitudes has ", magnitudes.numel(), " entries, expected ", count);
  check_vector(threshold, "threshold", at::kFloat);
  TORCH_CHECK_VALUE(threshold.numel() == 2, "threshold has ", threshold.numel(), " entries, expected 2");
  Tensor thresholds = at::empty({2}, grad.options());
  float* held = threshold.mutable_data_ptr<float>();
  hvd_quant::model_measure(g, e, grad.numel(), ratio, step, held[0], magnitudes.mutable_data_ptr<float>(),
                           thresholds.mutable_data_ptr<float>());
  held[1] = 1;
  return thresholds;
}

Tensor adaptive_measure(const Tensor& grad, const Residual& residual, double ratio, int64_t step) {
  return measure(hvd_quant::adaptive_measure, grad, residual, ratio, step);
}

Cast cast_type(const std::string& dtype) {
  TORCH_CHECK_VALUE(dtype == "float32" || dtype == "float16" || dtype == "bfloat16", "dtype is ", dtype,
                    ", expected float32, float16 or bfloat16");
  return dtype == "float32" ? Cast::float32 : dtype == "float16" ? Cast::float16 : Cast::bfloat16;
}

Tensor cast_encode(const Tensor& grad, std::string dtype, std::string codec) {
  check_vector(grad, "grad", at::kFloat);
  const Cast type = cast_type(dtype);
  Tensor payload = empty_payload(hvd_quant::cast_payload_bytes(type, grad.numel()));
  hvd_quant::cast_encode(type, codec, grad.const_data_ptr<float>(), grad.numel(), payload.mutable_data_ptr<uint8_t>(),
                         threads());
  return payload;
}

std::string cast_decode_sum(const std::vector<Tensor>& payloads, std::string dtype, std::string codec, double scale,
                            const Tensor& out) {
  const std::vector<Bytes> bytes = bytes_of(payloads, out);
  const Cast type = cast_type(dtype);
  return complaint([&] {
    hvd_quant::cast_decode_sum(type, codec, bytes, out.numel(), float(scale), out.mutable_data_ptr<float>(), threads());
  });
}

// The benchmark's limits: reading two vectors and writing one, reading one, and writing one.
void stream_add(const Tensor& a, const Tensor& b, const Tensor& out) {
  for (const Tensor* t : {&a, &b, &out}) {
    check_vector(*t, "vector", at::kFloat);
    TORCH_CHECK_VALUE(t->numel() == out.numel(), "vectors of ", t->numel(), " and ", out.numel(),
                      " entries, expected the same");
  }
  const float *x = a.const_data_ptr<float>(), *y = b.const_data_ptr<float>();
  float* z = out.mutable_data_ptr<float>();
  threads()(out.numel(), 1 << 15,
            [&](int64_t begin, int64_t end) { hvd_quant::loops().add_all(x + begin, y + begin, z + begin, end - begin); });
}

void stream_read(const Tensor& a) {
  check_vector(a, "vector", at::kFloat);
  const float* x = a.const_data_ptr<float>();
  threads()(a.numel(), 1 << 15, [&](int64_t begin, int64_t end) { hvd_quant::loops().read_all(x + begin, end - begin); });
}

void stream_fill(const Tensor& out, double value, bool bypass_caches) {
  check_vector(out, "vector", at::kFloat);
  float* z = out.mutable_data_ptr<float>();
  threads()(out.numel(), 1 << 15,
            [&](int64_t begin, int64_t end) { hvd_quant::loops().fill(float(value), z + begin, end - begin, bypass_caches); });
}

std::string simd_level() { return hvd_quant::level_name(hvd_quant::level()); }

}  // namespace

#define DRAW "int stream, int first, int step, int rank, int phase"

TORCH_LIBRARY(hvd_quant, m) {
  m.def("onebit_encode(Tensor grad, Tensor(a!)? residual, int block_size, bool zeros=False) -> Tensor");
  m.def("onebit_decode_sum(Tensor[] payloads, int block_size, bool zeros=False, *, float scale, Tensor(a!) out) -> str");
  m.def("signsgd_encode(Tensor grad, Tensor(a!)? residual, int block_size, bool zeros) -> Tensor");
  m.def("signsgd_decode_sum(Tensor[] payloads, int block_size, bool zeros, *, float scale, Tensor(a!) out) -> str");
  m.def("qsgd_encode(Tensor grad, Tensor(a!)? residual, int bits, str norm, int block_size, " DRAW ") -> Tensor");
  m.def("qsgd_decode_sum(Tensor[] payloads, int bits, int block_size, *, float scale, Tensor(a!) out) -> str");
  m.def("terngrad_measure(Tensor grad, Tensor? residual, float clip) -> Tensor");
  m.def("terngrad_encode(Tensor grad, Tensor(a!)? residual, Tensor largest, " DRAW ") -> Tensor");
  m.def("terngrad_decode_sum(Tensor[] payloads, *, float scale, Tensor(a!) out) -> str");
  m.def("natural_encode(Tensor grad, Tensor(a!)? residual, " DRAW ") -> Tensor");
  m.def("natural_decode_sum(Tensor[] payloads, *, float scale, Tensor(a!) out) -> str");
  m.def("blockwise8_encode(Tensor grad, Tensor(a!)? residual, str code, int block_size) -> Tensor");
  m.def("blockwise8_decode_sum(Tensor[] payloads, str code, int block_size, *, float scale, Tensor(a!) out) -> str");
  m.def("threshold_encode(Tensor grad, Tensor(a!)? residual, float tau, int slots, int step) -> Tensor");
  m.def("threshold_decode_sum(Tensor[] payloads, int slots, *, float scale, Tensor(a!) out) -> str");
  m.def("adaptive_measure(Tensor grad, Tensor? residual, float ratio, int step) -> Tensor");
  m.def("adaptive_encode(Tensor grad, Tensor(a!)? residual, Tensor thresholds, int slots, int step) -> Tensor");
  m.def("adaptive_decode_sum(Tensor[] payloads, int slots, *, float scale, Tensor(a!) out) -> str");
  m.def("topk_measure(Tensor grad, Tensor? residual, float ratio, int step) -> Tensor");
  m.def(
      "model_measure(Tensor grad, Tensor? residual, float ratio, int step, Tensor(a!) magnitudes, Tensor(b!) threshold)"
      " -> Tensor");
  m.def("topk_encode(Tensor grad, Tensor(a!)? residual, Tensor thresholds, int slots, str values, int step) -> Tensor");
  m.def("topk_decode_sum(Tensor[] payloads, int slots, str values, *, float scale, Tensor(a!) out) -> str");
  m.def("cast_encode(Tensor grad, str dtype, str codec) -> Tensor");
  m.def("cast_decode_sum(Tensor[] payloads, str dtype, str codec, *, float scale, Tensor(a!) out) -> str");
  m.def("stream_add(Tensor a, Tensor b, Tensor(a!) out) -> ()");
  m.def("stream_read(Tensor a) -> ()");
  m.def("stream_fill(Tensor(a!) out, float value, bool bypass_caches) -> ()");
  m.def("simd_level() -> str", simd_level);
}

TORCH_LIBRARY_IMPL(hvd_quant, CPU, m) {
  m.impl("onebit_encode", signs_encode<hvd_quant::onebit_signs>);
  m.impl("onebit_decode_sum", signs_decode_sum<hvd_quant::onebit_signs>);
  m.impl("signsgd_encode", signs_encode<hvd_quant::signsgd_signs>);
  m.impl("signsgd_decode_sum", signs_decode_sum<hvd_quant::signsgd_signs>);
  m.impl("qsgd_encode", qsgd_encode);
  m.impl("qsgd_decode_sum", qsgd_decode_sum);
  m.impl("terngrad_measure", terngrad_measure);
  m.impl("terngrad_encode", terngrad_encode);
  m.impl("terngrad_decode_sum", terngrad_decode_sum);
  m.impl("natural_encode", natural_encode);
  m.impl("natural_decode_sum", natural_decode_sum);
  m.impl("blockwise8_encode", blockwise8_encode);
  m.impl("blockwise8_decode_sum", blockwise8_decode_sum);
  m.impl("threshold_encode", threshold_encode);
  m.impl("threshold_decode_sum", threshold_decode_sum);
  m.impl("adaptive_measure", adaptive_measure);
  m.impl("adaptive_encode", adaptive_encode);
  m.impl("adaptive_decode_sum", adaptive_decode_sum);
  m.impl("topk_measure", topk_measure);
  m.impl("model_measure", model_measure);
  m.impl("topk_encode", topk_encode);
  m.impl("topk_decode_sum", topk_decode_sum);
  m.impl("cast_encode", cast_encode);
  m.impl("cast_decode_sum", cast_decode_sum);
  m.impl("stream_add", stream_add);
  m.impl("stream_read", stream_read);
  m.impl("stream_fill", stream_fill);
}

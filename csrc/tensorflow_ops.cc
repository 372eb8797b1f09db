// TensorFlow's view of the kernels: arguments checked, variables locked, memory and threads lent. The caller is
// hvd_quant/ops/tensorflow.py.
//
// A vector may be worked on in ranges, each with a payload of its own: so an operation serves all the ranges of a tensor, whose
// payloads follow each other.
//
// An encoder or measure is two operations with one kernel. The one with a residual reads or changes a variable, so it
// is stateful, which keeps the graph optimiser from dropping or merging it. The one without is a plain function: if it
// were stateful too, a tf.function would run it one after another with all else that is stateful without a variable.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cast.h"
#include "kernels/fields.h"
#include "kernels/measure.h"
#include "kernels/onebit.h"
#include "kernels/restore.h"
#include "kernels/sparse.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/log_memory.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

using hvd_quant::Bytes;
using hvd_quant::Cast;
using hvd_quant::Code;
using hvd_quant::Fields;
using hvd_quant::Parallel;
using hvd_quant::PayloadError;
using hvd_quant::SparseLayout;
using tensorflow::DEVICE_CPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// ------------------------------------------------------------------------------------------------ errors and arguments

// A status as an exception: kernels and shape functions are written with exceptions, and status_of() ends these.
struct Failure {
  absl::Status status;
};

void ok(absl::Status status) {
  if (!status.ok()) throw Failure{std::move(status)};
}

template <class... What>
void expect(bool condition, const What&... what) {
  if (!condition) throw Failure{absl::InvalidArgumentError(absl::StrCat(what...))};
}

template <class Function>
absl::Status status_of(const Function& function) {
  try {
    function();
    return absl::OkStatus();
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const PayloadError& error) {
    return absl::DataLossError(error.what());
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("hvd_quant could not allocate memory");
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

// An attribute, in a kernel's constructor or a shape function.
template <class T, class Context>
T attribute(Context* ctx, const char* name) {
  T value;
  ok(ctx->GetAttr(name, &value));
  return value;
}

template <class Context>
int64_t block_size_of(Context* ctx) {
  const int64_t block_size = attribute<int64_t>(ctx, "block_size");
  expect(block_size > 0 && block_size % 64 == 0, "block_size is ", block_size, ", expected a positive multiple of 64");
  return block_size;
}

template <class Context>
std::vector<int64_t> slots_of(Context* ctx) {
  const auto each = attribute<std::vector<int64_t>>(ctx, "slots");
  for (const int64_t slots : each)
    expect(slots > 0 && slots % 8 == 0 && slots < int64_t{1} << 32, "slots is ", slots,
           ", expected a positive multiple of 8 below 2^32");
  return each;
}

template <class Context>
Cast cast_of(Context* ctx) {
  const auto dtype = attribute<std::string>(ctx, "dtype");
  expect(dtype == "float32" || dtype == "float16" || dtype == "bfloat16", "dtype is ", dtype,
         ", expected float32, float16 or bfloat16");
  return dtype == "float32" ? Cast::float32 : dtype == "float16" ? Cast::float16 : Cast::bfloat16;
}

// The code itself, but for topk, which has several by its attribute `values`.
template <Code code, class Context>
Code code_of(Context* ctx) {
  if (code != Code::topk) return code;
  const auto values = attribute<std::string>(ctx, "values");
  const Code named = hvd_quant::topk_code(values);
  expect(named >= Code::topk, "values is ", values, ", expected ", hvd_quant::kTopkValues);
  return named;
}

template <class Context>
int bits_of(Context* ctx) {
  const auto bits = attribute<int64_t>(ctx, "bits");
  expect(bits == 2 || bits == 4 || bits == 8, "bits is ", bits, ", expected 2, 4 or 8");
  return int(bits);
}

template <class Context>
bool dynamic_of(Context* ctx) {
  const auto code = attribute<std::string>(ctx, "code");
  expect(code == "linear" || code == "dynamic", "code is ", code, ", expected linear or dynamic");
  return code == "dynamic";
}

// The ranges of a vector: those that the attribute `bounds` tells, which holds the first and one past the last entry of each,
// or the vector in one piece where it is empty.
struct Cut {
  int64_t first, last;
  int64_t entries() const { return last - first; }
};

template <class Context>
std::vector<int64_t> bounds_of(Context* ctx) {
  const auto bounds = attribute<std::vector<int64_t>>(ctx, "bounds");
  expect(bounds.size() % 2 == 0, "bounds has ", bounds.size(), " entries, expected two a range");
  for (size_t i = 0; i < bounds.size(); i += 2)
    expect(0 <= bounds[i] && bounds[i] <= bounds[i + 1], "a range goes from ", bounds[i], " to ", bounds[i + 1]);
  return bounds;
}

std::vector<Cut> cuts_of(const std::vector<int64_t>& bounds, int64_t numel) {
  if (bounds.empty()) return {{0, numel}};
  std::vector<Cut> cuts;
  for (size_t i = 0; i < bounds.size(); i += 2) {
    expect(bounds[i + 1] <= numel, "a range goes up to ", bounds[i + 1], ", the vector has ", numel, " entries");
    cuts.push_back({bounds[i], bounds[i + 1]});
  }
  return cuts;
}

// What the payloads of a code look like, by an operation's attributes; `range` counts the ranges.
template <hvd_quant::Signs (*kind)(int64_t block_size, bool zeros)>
struct Signs {
  template <class Context>
  explicit Signs(Context* ctx) : code(kind(block_size_of(ctx), attribute<bool>(ctx, "zeros"))) {}
  std::string codec() const { return code.codec; }
  int64_t payload_bytes(int64_t numel, size_t) const { return hvd_quant::signs_payload_bytes(code, numel); }
  void decode_sum(const std::vector<Bytes>& payloads, int64_t numel, size_t, float scale, float* out,
                  const Parallel& parallel) const {
    hvd_quant::signs_decode_sum(code, payloads, numel, scale, out, parallel);
  }

  hvd_quant::Signs code;
};

using Onebit = Signs<hvd_quant::onebit_signs>;
using SignSgd = Signs<hvd_quant::signsgd_signs>;

struct OfFields {
  std::string codec() const { return code.codec; }
  int64_t payload_bytes(int64_t numel, size_t) const { return hvd_quant::fields_payload_bytes(code, numel); }
  void decode_sum(const std::vector<Bytes>& payloads, int64_t numel, size_t, float scale, float* out,
                  const Parallel& parallel) const {
    hvd_quant::fields_decode_sum(code, payloads, numel, scale, out, parallel);
  }

  Fields code;
};

struct Qsgd : OfFields {
  template <class Context>
  explicit Qsgd(Context* ctx) : OfFields{hvd_quant::qsgd_fields(bits_of(ctx), block_size_of(ctx))} {}
};

struct TernGrad : OfFields {
  template <class Context>
  explicit TernGrad(Context*) : OfFields{hvd_quant::terngrad_fields()} {}
};

struct Natural : OfFields {
  template <class Context>
  explicit Natural(Context*) : OfFields{hvd_quant::natural_fields()} {}
};

struct Blockwise8 : OfFields {
  template <class Context>
  explicit Blockwise8(Context* ctx) : OfFields{hvd_quant::blockwise8_fields(dynamic_of(ctx), block_size_of(ctx))} {}
};

template <Code kind>
struct Sparse {
  template <class Context>
  explicit Sparse(Context* ctx) : code(code_of<kind>(ctx)), slots(slots_of(ctx)) {}
  std::string codec() const { return SparseLayout(code, 0, 8).codec; }
  SparseLayout layout(int64_t numel, size_t range) const {
    expect(range < slots.size(), "slots has ", slots.size(), " entries, expected one a range");
    return SparseLayout(code, numel, slots[range]);
  }
  int64_t payload_bytes(int64_t numel, size_t range) const { return layout(numel, range).payload_bytes; }
  void decode_sum(const std::vector<Bytes>& payloads, int64_t numel, size_t range, float scale, float* out,
                  const Parallel& parallel) const {
    hvd_quant::sparse_decode_sum(code, payloads, numel, layout(numel, range).slots, scale, out, parallel);
  }

  Code code;
  std::vector<int64_t> slots;
};

struct Values {
  template <class Context>
  explicit Values(Context* ctx) : type(cast_of(ctx)), name(attribute<std::string>(ctx, "codec")) {}
  std::string codec() const { return name; }
  int64_t payload_bytes(int64_t numel, size_t) const { return hvd_quant::cast_payload_bytes(type, numel); }
  void decode_sum(const std::vector<Bytes>& payloads, int64_t numel, size_t, float scale, float* out,
                  const Parallel& parallel) const {
    hvd_quant::cast_decode_sum(type, name, payloads, numel, scale, out, parallel);
  }

  Cast type;
  std::string name;
};

// The bytes of a vector's payloads together. A range without entries has none, unless it is the whole of the vector.
template <class Format>
int64_t payloads_bytes(const Format& format, const std::vector<Cut>& cuts) {
  int64_t total = 0;
  for (size_t i = 0; i < cuts.size(); ++i)
    if (cuts[i].entries() || cuts.size() == 1) total += format.payload_bytes(cuts[i].entries(), i);
  return total;
}

const Tensor& input(OpKernelContext* ctx, const char* name) {
  const Tensor* tensor;
  ok(ctx->input(name, &tensor));
  return *tensor;
}

template <class T>
T scalar(OpKernelContext* ctx, const char* name) {
  const Tensor& tensor = input(ctx, name);
  expect(tensor.dims() == 0, name, " has shape ", tensor.shape().DebugString(), ", expected a scalar");
  return tensor.scalar<T>()();
}

void check_vector(const Tensor& t, const char* name) {
  expect(t.dims() == 1, name, " has ", t.dims(), " dimensions, expected a flat vector: pass tf.reshape(", name, ", [-1])");
}

const Tensor& vector(OpKernelContext* ctx, const char* name) {
  const Tensor& tensor = input(ctx, name);
  check_vector(tensor, name);
  return tensor;
}

template <class T>
T* new_output(OpKernelContext* ctx, const TensorShape& shape, int index = 0) {
  Tensor* output;
  ok(ctx->allocate_output(index, shape, &output));
  return output->flat<T>().data();
}

// ------------------------------------------------------------------------------------------------------------- kernels

// An operation that may throw. Its status is set without OP_REQUIRES_OK, which would log it as well.
class Kernel : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) final {
    ctx->SetStatus(status_of([&] { run(ctx); }));
  }

 private:
  virtual void run(OpKernelContext* ctx) = 0;
};

// TensorFlow's threads for the inside of operations. No exception may leave them, so it is brought to the caller.
Parallel threads(OpKernelContext* ctx) {
  const auto& pool = *ctx->device()->tensorflow_cpu_worker_threads();
  Parallel parallel;
  if (pool.num_threads == 1) return parallel;
  parallel.threads = pool.num_threads;
  parallel.run = [&pool](int64_t n, int64_t grain, const hvd_quant::Range& body) {
    std::exception_ptr failure;
    std::mutex mutex;
    const int64_t most = std::max(grain, hvd_quant::ceil_div(n, pool.num_threads));
    pool.workers->TransformRangeConcurrently(most, n, [&](int64_t begin, int64_t end) {
      try {
        body(begin, end);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        failure = std::current_exception();
      }
    });
    if (failure) std::rethrow_exception(failure);
  };
  return parallel;
}

// The variable that is an operation's last input, locked while this lives: a flat fp32 vector of `numel` entries, or of any
// number if that is negative.
class Residual {
 public:
  Residual(OpKernelContext* ctx, int64_t numel) {
    const char* missing = "residual is a variable without a value, expected an initialized one";
    expect(LookupResource(ctx, tensorflow::HandleFromInput(ctx, ctx->num_inputs() - 1), &variable_).ok(), missing);
    lock_ = Lock(*variable_->mu());
    expect(variable_->is_initialized, missing);
    const Tensor& held = *variable_->tensor();
    expect(held.dtype() == tensorflow::DT_FLOAT, "residual is ", tensorflow::DataTypeString(held.dtype()), ", expected float");
    check_vector(held, "residual");
    expect(numel < 0 || held.NumElements() == numel, "residual has ", held.NumElements(),
           " entries, expected as many as grad: ", numel);
  }

  int64_t numel() const { return variable_->tensor()->NumElements(); }

  const float* read() const { return variable_->tensor()->flat<float>().data(); }

  // A reader of the variable holds its memory, not a copy: what is still held must not change.
  float* write(OpKernelContext* ctx) {
    Tensor& held = *variable_->tensor();
    if (!held.RefCountIsOne()) {
      Tensor copy;
      ok(ctx->allocate_temp(held.dtype(), held.shape(), &copy));
      std::copy_n(held.unaligned_flat<float>().data(), held.NumElements(), copy.unaligned_flat<float>().data());
      held = copy;
    }
    return held.unaligned_flat<float>().data();
  }

 private:
  using Lock = std::unique_lock<std::remove_pointer_t<decltype(std::declval<tensorflow::Var>().mu())>>;
  tensorflow::core::RefCountPtr<tensorflow::Var> variable_;
  Lock lock_;  // after the variable, so that it is released first
};

// An encoder or measure: an operation whose first input is a gradient and whose last one may be a residual.
class OfGradient : public Kernel {
 public:
  using Kernel::Kernel;

 private:
  void run(OpKernelContext* ctx) final {
    const Tensor& grad = vector(ctx, "grad");
    const float* g = grad.unaligned_flat<float>().data();
    const int64_t numel = grad.NumElements();
    if (ctx->input_dtype(ctx->num_inputs() - 1) != tensorflow::DT_RESOURCE) return run(ctx, g, nullptr, numel);
    Residual residual(ctx, numel);
    run(ctx, g, &residual, numel);
  }
  virtual void run(OpKernelContext* ctx, const float* grad, Residual* residual, int64_t numel) = 0;
};

// Takes the encode of a range back, but for a payload that tells no more what was encoded.
template <class Format>
void take_back(OpKernelContext* ctx, const Format& format, const float* g, float* e, Cut cut, size_t range,
               const uint8_t* payload) {
  const int64_t size = format.payload_bytes(cut.entries(), range);
  std::vector<uint8_t> clean(payload, payload + size);
  std::vector<float> decoded(cut.entries());
  try {
    if (hvd_quant::check_header({clean.data(), size}, format.codec(), cut.entries()) & hvd_quant::kFailed) return;
    hvd_quant::check_sum({clean.data(), size});
    hvd_quant::seal(clean.data(), size, true);
    format.decode_sum({{clean.data(), size}}, cut.entries(), range, 1.0f, decoded.data(), threads(ctx));
  } catch (const PayloadError&) {
    return;
  }
  hvd_quant::restore(e, decoded.data(), g, cut.entries(), threads(ctx));
}

// The payloads of all ranges, one after another, and their bytes. In the place of an error, the others get failure payloads from
// this `worker`, so that they don't wait for it, unless that is negative; the residual is as before then.
template <class Form>
class Encode : public OfGradient {
 public:
  explicit Encode(OpKernelConstruction* ctx) : OfGradient(ctx) {
    ctx->SetStatus(status_of([&] {
      format_.emplace(ctx);
      bounds_ = bounds_of(ctx);
    }));
  }

 protected:
  using Format = Form;

 private:
  void run(OpKernelContext* ctx, const float* grad, Residual* residual, int64_t numel) final {
    const auto cuts = cuts_of(bounds_, numel);
    const auto worker = scalar<int32_t>(ctx, "worker");
    auto* sizes = new_output<int64_t>(ctx, {int64_t(cuts.size())}, 1);
    Tensor payloads;
    const absl::Status status = status_of([&] { payloads = encoded(ctx, grad, residual, cuts, sizes); });
    if (!status.ok()) {
      if (worker < 0) throw Failure{status};
      payloads = failures(ctx, worker, std::string(status.message()), cuts, sizes);
    }
    ctx->set_output(0, payloads);
  }

  Tensor encoded(OpKernelContext* ctx, const float* grad, Residual* residual, const std::vector<Cut>& cuts, int64_t* sizes) {
    prepare(ctx);
    Tensor payloads = bytes(ctx, payloads_bytes(*format_, cuts));
    uint8_t* const begin = payloads.flat<uint8_t>().data();
    uint8_t* payload = begin;
    float* e = residual ? residual->write(ctx) : nullptr;
    for (size_t i = 0; i < cuts.size(); ++i) {
      const Cut cut = cuts[i];
      sizes[i] = 0;
      if (skipped(cut, cuts)) continue;
      sizes[i] = format_->payload_bytes(cut.entries(), i);
      try {
        encode(ctx, *format_, grad + cut.first, e ? e + cut.first : nullptr, cut, i, payload);
      } catch (...) {
        payload = begin;
        for (size_t j = 0; e && j < i; payload += sizes[j++])
          if (sizes[j]) take_back(ctx, *format_, grad + cuts[j].first, e + cuts[j].first, cuts[j], j, payload);
        throw;
      }
      payload += sizes[i];
    }
    return payloads;
  }

  Tensor failures(OpKernelContext* ctx, int32_t worker, const std::string& reason, const std::vector<Cut>& cuts,
                  int64_t* sizes) const {
    std::vector<uint8_t> all;
    for (size_t i = 0; i < cuts.size(); ++i) {
      sizes[i] = 0;
      if (skipped(cuts[i], cuts)) continue;
      const auto one = hvd_quant::failure(format_->codec(), cuts[i].entries(), worker, reason);
      sizes[i] = int64_t(one.size());
      all.insert(all.end(), one.begin(), one.end());
    }
    Tensor payloads = bytes(ctx, int64_t(all.size()));
    std::copy(all.begin(), all.end(), payloads.flat<uint8_t>().data());
    return payloads;
  }

  static Tensor bytes(OpKernelContext* ctx, int64_t size) {
    Tensor tensor;
    ok(ctx->allocate_temp(tensorflow::DT_UINT8, {size}, &tensor));
    return tensor;
  }
  static bool skipped(Cut cut, const std::vector<Cut>& cuts) { return cut.entries() == 0 && cuts.size() > 1; }

  virtual void prepare(OpKernelContext* ctx) {}
  virtual void encode(OpKernelContext* ctx, const Format& format, const float* g, float* e, Cut cut, size_t range,
                      uint8_t* payload) = 0;

  std::optional<Format> format_;
  std::vector<int64_t> bounds_;
};

template <class Format>
class SignsEncode : public Encode<Format> {
 public:
  using Encode<Format>::Encode;

 private:
  void encode(OpKernelContext* ctx, const Format& format, const float* g, float* e, Cut cut, size_t,
              uint8_t* payload) override {
    hvd_quant::signs_encode(format.code, g, e, cut.entries(), payload, threads(ctx));
  }
};

// Encodes fields; those that are rounded at random have an input for each of what changes from step to step or from worker to
// worker.
template <class Format>
class FieldsEncode : public Encode<Format> {
 public:
  static constexpr bool random = !std::is_same_v<Format, Blockwise8>;

  explicit FieldsEncode(OpKernelConstruction* ctx) : Encode<Format>(ctx) {
    if (!random || !ctx->status().ok()) return;
    ctx->SetStatus(status_of([&] {
      draw_.stream = attribute<int64_t>(ctx, "stream");
      draw_.first = attribute<int64_t>(ctx, "first");
      draw_.phase = attribute<int64_t>(ctx, "phase");
      if (!std::is_same_v<Format, Qsgd>) return;
      const auto norm = attribute<std::string>(ctx, "norm");
      expect(norm == "max" || norm == "l2", "norm is ", norm, ", expected max or l2");
      l2_ = norm == "l2";
    }));
  }

 private:
  void encode(OpKernelContext* ctx, const Format& format, const float* g, float* e, Cut cut, size_t,
              uint8_t* payload) override {
    hvd_quant::fields_encode(format.code, rounding(ctx, cut), g, e, cut.entries(), payload, threads(ctx));
  }

  hvd_quant::Rounding rounding(OpKernelContext* ctx, Cut cut) const {
    if (!random) return hvd_quant::to_nearest();
    hvd_quant::Draw draw = draw_;
    draw.first += cut.first;
    draw.step = scalar<int64_t>(ctx, "step");
    draw.rank = scalar<int32_t>(ctx, "rank");
    expect(draw.first >= 0 && draw.first % 64 == 0, "first is ", draw.first, ", expected a multiple of 64");
    if (!std::is_same_v<Format, TernGrad>) return hvd_quant::at_random(draw, l2_);
    const hvd_quant::DenormalGuard guard;  // it may be a denormal
    const Tensor& largest = vector(ctx, "largest");
    expect(largest.NumElements() == 1, "largest has ", largest.NumElements(), " entries, expected 1");
    const float scale = *largest.unaligned_flat<float>().data();
    expect(scale >= 0 && std::isfinite(scale), "largest is ", scale, ", expected a finite number of at least 0");
    return hvd_quant::at_random(draw, false, scale);
  }

  hvd_quant::Draw draw_ = {};
  bool l2_ = false;
};

// The thresholds, which must lie on both sides of 0.
std::pair<float, float> thresholds_of(OpKernelContext* ctx) {
  const hvd_quant::DenormalGuard guard;  // the smallest threshold is a denormal
  const Tensor& thresholds = vector(ctx, "thresholds");
  expect(thresholds.NumElements() == 2, "thresholds has ", thresholds.NumElements(), " entries, expected 2");
  const float* tau = thresholds.unaligned_flat<float>().data();
  expect(tau[0] > 0 && tau[1] < 0, "thresholds is (", tau[0], ", ", tau[1], "), expected a positive and a negative one");
  return {tau[0], tau[1]};
}

template <Code code>
class SparseEncode : public Encode<Sparse<code>> {
 public:
  explicit SparseEncode(OpKernelConstruction* ctx) : Encode<Sparse<code>>(ctx) {
    if (code != Code::threshold || !ctx->status().ok()) return;
    ctx->SetStatus(status_of([&] {
      const hvd_quant::DenormalGuard guard;
      tau_ = attribute<float>(ctx, "tau");
      expect(tau_ > 0 && std::isfinite(tau_), "tau is ", tau_, ", expected a positive number that fp32 holds");
    }));
  }

 private:
  void prepare(OpKernelContext* ctx) override {
    if (code != Code::threshold) thresholds_of(ctx);
    scalar<int64_t>(ctx, "step");
  }
  void encode(OpKernelContext* ctx, const Sparse<code>& format, const float* g, float* e, Cut cut, size_t range,
              uint8_t* payload) override {
    const auto [high, low] = code == Code::threshold ? std::pair(tau_, -tau_) : thresholds_of(ctx);
    hvd_quant::sparse_encode(format.code, g, e, cut.entries(), high, low, format.slots[range], scalar<int64_t>(ctx, "step"),
                             payload, threads(ctx));
  }

  float tau_ = 0;
};

using ThresholdEncode = SparseEncode<Code::threshold>;
using AdaptiveEncode = SparseEncode<Code::adaptive>;
using TopkEncode = SparseEncode<Code::topk>;

class CastEncode : public Encode<Values> {
 public:
  using Encode::Encode;

 private:
  void encode(OpKernelContext* ctx, const Values& format, const float* g, float*, Cut cut, size_t, uint8_t* payload) override {
    hvd_quant::cast_encode(format.type, format.name, g, cut.entries(), payload, threads(ctx));
  }
};

template <void (*kernel)(const float*, const float*, int64_t, double, int64_t, float*)>
class Measure : public OfGradient {
 public:
  using OfGradient::OfGradient;

 private:
  void run(OpKernelContext* ctx, const float* grad, Residual* residual, int64_t numel) override {
    const auto ratio = scalar<double>(ctx, "ratio");
    expect(ratio > 0 && ratio <= 1, "ratio is ", ratio, ", expected 0 < ratio <= 1");
    const auto step = scalar<int64_t>(ctx, "step");
    kernel(grad, residual ? residual->read() : nullptr, numel, ratio, step, new_output<float>(ctx, {2}));
  }
};

class TernGradMeasure : public OfGradient {
 public:
  using OfGradient::OfGradient;

 private:
  void run(OpKernelContext* ctx, const float* grad, Residual* residual, int64_t numel) override {
    const auto clip = scalar<double>(ctx, "clip");
    expect(clip >= 0, "clip is ", clip, ", expected a number of standard deviations, 0 for none");
    const float* e = residual ? residual->read() : nullptr;
    *new_output<float>(ctx, {1}) = hvd_quant::terngrad_measure(grad, e, numel, clip, threads(ctx));
  }
};

using AdaptiveMeasure = Measure<hvd_quant::adaptive_measure>;
using TopkMeasure = Measure<hvd_quant::topk_measure>;

// `threshold` is what a variable holds: the threshold that tensors share or 0.
class ModelMeasure : public OfGradient {
 public:
  using OfGradient::OfGradient;

 private:
  void run(OpKernelContext* ctx, const float* grad, Residual* residual, int64_t numel) override {
    const auto ratio = scalar<double>(ctx, "ratio");
    expect(ratio > 0 && ratio <= 1, "ratio is ", ratio, ", expected 0 < ratio <= 1");
    const auto step = scalar<int64_t>(ctx, "step");
    const Tensor& threshold = vector(ctx, "threshold");
    expect(threshold.NumElements() == 2, "threshold has ", threshold.NumElements(), " entries, expected 2");
    auto* thresholds = new_output<float>(ctx, {2});
    auto* magnitudes = new_output<float>(ctx, {hvd_quant::sample_size(numel)}, 1);
    hvd_quant::model_measure(grad, residual ? residual->read() : nullptr, numel, ratio, step, threshold.flat<float>()(0),
                             magnitudes, thresholds);
  }
};

// Where the payloads are in what a collective returned, as [rows, columns, 2] of first byte and size: `columns` tensors in each
// row. They are of the sizes that are expected if these make up the whole, else as their headers tell, and if these make no
// sense and nothing is expected, of one size. Otherwise all are at -1, of which the decoders will tell: nothing is raised here.
class Locate : public Kernel {
 public:
  explicit Locate(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, status_of([&] {
                     columns_ = attribute<int64_t>(ctx, "columns");
                     sizes_ = attribute<std::vector<int64_t>>(ctx, "sizes");
                   }));
  }

 private:
  void run(OpKernelContext* ctx) override {
    const Tensor& gathered = vector(ctx, "gathered");
    const int64_t rows = scalar<int32_t>(ctx, "rows"), count = rows * columns_, total = gathered.NumElements();
    expect(rows > 0, "world is ", rows, ", expected the number of workers");
    expect(sizes_.empty() || int64_t(sizes_.size()) == columns_ || int64_t(sizes_.size()) == count, "sizes has ", sizes_.size(),
           " entries, expected one for each of ", columns_, " columns or ", count, " payloads");
    auto* table = new_output<int64_t>(ctx, {rows, columns_, 2});
    std::vector<int64_t> sizes(count, -1);
    for (int64_t i = 0; i < count && !sizes_.empty(); ++i) sizes[i] = sizes_[i % int64_t(sizes_.size())];
    const auto fits = [&] {
      int64_t sum = 0;
      for (const int64_t size : sizes) sum += size;
      return sum == total;
    };
    if (sizes_.empty() || !fits()) {
      if (!walk({gathered.unaligned_flat<uint8_t>().data(), total}, sizes) &&
          (!sizes_.empty() || total % std::max<int64_t>(count, 1) || total < count * hvd_quant::kHeaderBytes)) {
        std::fill_n(table, 2 * count, -1);
        return;
      }
      if (sizes_.empty() && !fits()) sizes.assign(count, total / count);
    }
    int64_t first = 0;
    for (int64_t i = 0; i < count; ++i) {
      table[2 * i] = first;
      table[2 * i + 1] = sizes[i];
      first += sizes[i];
    }
  }

  // Sets the sizes that the headers tell, but where no payload is expected, and returns whether these make up the whole.
  static bool walk(Bytes rest, std::vector<int64_t>& sizes) {
    for (int64_t& size : sizes) {
      if (size == 0) continue;
      if (rest.size < hvd_quant::kHeaderBytes) return false;
      const auto body = hvd_quant::load_as<uint64_t>(rest.data + 16);
      if (body > uint64_t(rest.size - hvd_quant::kHeaderBytes)) return false;
      size = hvd_quant::kHeaderBytes + int64_t(body);
      rest = {rest.data + size, rest.size - size};
    }
    return rest.size == 0;
  }

  int64_t columns_;
  std::vector<int64_t> sizes_;
};

// An operation on the payloads of one tensor, the column `column` of a table. Each range has as many of its rows, in turn. Its
// errors begin with the parameter's name.
class OfPayloads : public Kernel {
 public:
  explicit OfPayloads(OpKernelConstruction* ctx) : Kernel(ctx) {
    ctx->SetStatus(status_of([&] {
      numel_ = attribute<int64_t>(ctx, "numel");
      column_ = attribute<int64_t>(ctx, "column");
      cuts_ = cuts_of(bounds_of(ctx), numel_);
    }));
  }

 protected:
  // The payloads of a range. (PayloadError if there was no telling where they are.)
  std::vector<Bytes> payloads(OpKernelContext* ctx, size_t range) const {
    const Tensor& gathered = vector(ctx, "gathered");
    const Tensor& table = input(ctx, "table");
    expect(table.dims() == 3 && table.dim_size(2) == 2 && column_ < table.dim_size(1) &&
               table.dim_size(0) % int64_t(cuts_.size()) == 0,
           "table has shape ", table.shape().DebugString(), ", expected rows of more than ", column_,
           " payloads and a multiple of ", cuts_.size(), " rows");
    const int64_t each = table.dim_size(0) / int64_t(cuts_.size()), total = gathered.NumElements();
    const auto at = table.tensor<int64_t, 3>();
    std::vector<Bytes> found;
    for (int64_t i = int64_t(range) * each; i < int64_t(range + 1) * each; ++i) {
      const int64_t first = at(i, column_, 0), size = at(i, column_, 1);
      if (first < 0)
        throw PayloadError(
            hvd_quant::format("%lld payloads came as %lld bytes whose headers tell other lengths: a payload is "
                              "damaged, or compression settings differ between workers",
                              (long long)(table.dim_size(0) * table.dim_size(1)), (long long)total));
      expect(size >= 0 && first + size <= total, "table has a payload from ", first, " to ", first + size, " of ", total);
      found.push_back({gathered.unaligned_flat<uint8_t>().data() + first, size});
    }
    return found;
  }
  bool skipped(size_t range) const { return cuts_[range].entries() == 0 && cuts_.size() > 1; }

  int64_t numel_, column_;
  std::vector<Cut> cuts_;
};

// Tells also of damage that a payload's header and checksum show, so that what was encoded can be taken back before a decoder
// says what is wrong.
class Flags : public OfPayloads {
 public:
  explicit Flags(OpKernelConstruction* ctx) : OfPayloads(ctx) {
    if (ctx->status().ok()) ctx->SetStatus(status_of([&] { codec_ = attribute<std::string>(ctx, "codec"); }));
  }

 private:
  void run(OpKernelContext* ctx) override {
    constexpr int32_t kDamaged = 4;
    int32_t flags = 0;
    for (size_t i = 0; i < cuts_.size(); ++i) {
      if (skipped(i)) continue;
      try {
        for (const Bytes& payload : payloads(ctx, i)) {
          flags |= hvd_quant::check_header(payload, codec_, cuts_[i].entries());
          hvd_quant::check_sum(payload);
        }
      } catch (const PayloadError&) {
        flags |= kDamaged;
      }
    }
    *new_output<int32_t>(ctx, {}) = flags;
  }

  std::string codec_;
};

// Sums of each range's payloads, NaN throughout where one of any range was not finite. Of several tensors with errors that of the
// column `teller` is raised, unless it is negative, so that all workers tell the same. An owner, which must not leave the others
// waiting, gets zeros in the place of an error, and what to send: a failure payload.
template <class Format>
class Decode : public OfPayloads {
 public:
  explicit Decode(OpKernelConstruction* ctx) : OfPayloads(ctx) {
    if (!ctx->status().ok()) return;
    ctx->SetStatus(status_of([&] {
      format_.emplace(ctx);
      name_ = attribute<std::string>(ctx, "name_of");
      owner_ = attribute<int64_t>(ctx, "owner");
    }));
  }

 private:
  void run(OpKernelContext* ctx) final {
    const auto scale = scalar<float>(ctx, "scale");
    const TensorShape shape({numel_});
    std::vector<int> reused;
    for (int i = 4; i < ctx->num_inputs(); ++i) {
      expect(ctx->input(i).shape() == shape, "out has shape ", ctx->input(i).shape().DebugString(), ", expected ",
             shape.DebugString());
      reused.push_back(i);
    }
    Tensor* out;
    ok(ctx->forward_input_or_allocate_output(reused, 0, shape, &out));
    std::vector<uint8_t> failure;
    bool finite = true;
    for (size_t i = 0; i < cuts_.size(); ++i)
      if (!skipped(i)) finite &= decode(ctx, i, scale, out->flat<float>().data(), &failure);
    // A kernel makes its range NaN; here the whole tensor is void.
    if (!finite) std::fill_n(out->flat<float>().data(), numel_, std::numeric_limits<float>::quiet_NaN());
    std::copy(failure.begin(), failure.end(), new_output<uint8_t>(ctx, {int64_t(failure.size())}, 1));
  }

  // Returns whether all payloads of a range are finite.
  bool decode(OpKernelContext* ctx, size_t range, float scale, float* out, std::vector<uint8_t>* failure) {
    const Cut cut = cuts_[range];
    std::vector<Bytes> found;
    try {
      found = payloads(ctx, range);
      format_->decode_sum(found, cut.entries(), range, scale, out + cut.first, threads(ctx));
      return std::none_of(found.begin(), found.end(), [](const Bytes& p) { return p.data[3] & hvd_quant::kNonfinite; });
    } catch (const PayloadError& error) {
      const auto teller = scalar<int32_t>(ctx, "teller");
      if (owner_ < 0 && (teller < 0 || teller == column_))
        throw PayloadError(name_.empty() ? error.what() : name_ + ": " + error.what());
      std::fill_n(out + cut.first, cut.entries(), 0.0f);
      if (owner_ >= 0) *failure = passed_on(found, cut.entries(), error.what());
      return true;
    }
  }

  // The first payload that says that its worker failed, or what is wrong with one that is damaged.
  std::vector<uint8_t> passed_on(const std::vector<Bytes>& found, int64_t numel, const std::string& error) const {
    try {
      for (const Bytes& payload : found) {
        const int flags = hvd_quant::check_header(payload, format_->codec(), numel);
        hvd_quant::check_sum(payload);
        if (flags & hvd_quant::kFailed) return {payload.data, payload.data + payload.size};
      }
    } catch (const PayloadError&) {
    }
    return hvd_quant::failure(format_->codec(), numel, owner_, error);
  }

  std::optional<Format> format_;
  std::string name_;
  int64_t owner_;
};

// Takes the encode of all ranges back where `flags` aren't 0, but for payloads that tell no more what was encoded.
template <class Format>
class Undo : public OfGradient {
 public:
  explicit Undo(OpKernelConstruction* ctx) : OfGradient(ctx) {
    ctx->SetStatus(status_of([&] {
      format_.emplace(ctx);
      bounds_ = bounds_of(ctx);
    }));
  }

 private:
  void run(OpKernelContext* ctx, const float* grad, Residual* residual, int64_t numel) override {
    if (scalar<int32_t>(ctx, "flags") == 0) return;
    const Tensor& own = vector(ctx, "payload");
    const auto cuts = cuts_of(bounds_, numel);
    if (own.NumElements() != payloads_bytes(*format_, cuts)) return;
    const uint8_t* payload = own.unaligned_flat<uint8_t>().data();
    float* e = residual->write(ctx);
    for (size_t i = 0; i < cuts.size(); ++i) {
      const Cut cut = cuts[i];
      if (cut.entries() == 0) continue;
      take_back(ctx, *format_, grad + cut.first, e + cut.first, cut, i, payload);
      payload += format_->payload_bytes(cut.entries(), i);
    }
  }

  std::optional<Format> format_;
  std::vector<int64_t> bounds_;
};

// The payloads of tensors, each tensor's in the order of their owners, put together owner by owner; and each owner's bytes.
class ByOwner : public Kernel {
 public:
  using Kernel::Kernel;

 private:
  void run(OpKernelContext* ctx) override {
    const int64_t tensors = ctx->num_inputs() / 2;
    const int64_t owners = ctx->input(int(tensors)).NumElements();
    std::vector<const uint8_t*> next(tensors);
    int64_t total = 0;
    for (int64_t i = 0; i < tensors; ++i) {
      const Tensor &payloads = ctx->input(int(i)), &sizes = ctx->input(int(tensors + i));
      check_vector(payloads, "payloads");
      int64_t sum = 0;
      for (int64_t j = 0; j < sizes.NumElements(); ++j) sum += sizes.flat<int64_t>()(j);
      expect(sizes.NumElements() == owners && sum == payloads.NumElements(), "sizes add up to ", sum, " bytes for ",
             sizes.NumElements(), " owners, there are ", payloads.NumElements(), " for ", owners);
      next[i] = payloads.unaligned_flat<uint8_t>().data();
      total += sum;
    }
    auto* sent = new_output<uint8_t>(ctx, {total});
    auto* splits = new_output<int32_t>(ctx, {owners}, 1);
    for (int64_t owner = 0; owner < owners; ++owner) {
      const uint8_t* first = sent;
      for (int64_t i = 0; i < tensors; ++i) {
        const int64_t size = ctx->input(int(tensors + i)).flat<int64_t>()(owner);
        sent = std::copy_n(next[i], size, sent);
        next[i] += size;
      }
      expect(sent - first < int64_t{1} << 31, "payloads for one owner have ", sent - first, " bytes, expected less than 2^31");
      splits[owner] = int32_t(sent - first);
    }
  }
};

// The payload, or the failure if there is one.
class Instead : public Kernel {
 public:
  using Kernel::Kernel;

 private:
  void run(OpKernelContext* ctx) override {
    ctx->set_output(0, vector(ctx, "failure").NumElements() ? ctx->input(1) : ctx->input(0));
  }
};

class WithoutFlags : public Kernel {
 public:
  using Kernel::Kernel;

 private:
  void run(OpKernelContext* ctx) override {
    const Tensor& payload = vector(ctx, "payload");
    const int64_t size = payload.NumElements();
    expect(size >= hvd_quant::kHeaderBytes && size % 4 == 0, "payload has ", size,
           " bytes, expected a multiple of 4, at least 32");
    auto* clean = new_output<uint8_t>(ctx, {size});
    std::copy_n(payload.unaligned_flat<uint8_t>().data(), size, clean);
    hvd_quant::seal(clean, size, true);
  }
};

class Restore : public OfGradient {
 public:
  using OfGradient::OfGradient;

 private:
  void run(OpKernelContext* ctx, const float* grad, Residual* residual, int64_t numel) override {
    const Tensor& decoded = vector(ctx, "decoded");
    expect(decoded.NumElements() == numel, "decoded has ", decoded.NumElements(),
           " entries, expected as many as grad: ", numel);
    hvd_quant::restore(residual->write(ctx), decoded.unaligned_flat<float>().data(), grad, numel, threads(ctx));
  }
};

// A gradient with what was kept of it, which is no longer kept: `factor` times the residual is added from the entry `first` on.
// Where the gradient isn't finite nothing would be received, so nothing is given back.
class GiveBack : public Kernel {
 public:
  explicit GiveBack(OpKernelConstruction* ctx) : Kernel(ctx) {
    ctx->SetStatus(status_of([&] {
      first_ = attribute<int64_t>(ctx, "first");
      factor_ = attribute<float>(ctx, "factor");
    }));
  }

 private:
  void run(OpKernelContext* ctx) override {
    const Tensor& grad = vector(ctx, "grad");
    const float* g = grad.unaligned_flat<float>().data();
    const int64_t numel = grad.NumElements();
    Residual residual(ctx, -1);
    const int64_t count = residual.numel();
    expect(first_ >= 0 && first_ + count <= numel, "residual goes from ", first_, " to ", first_ + count, " of ", numel);
    const float* e = residual.read();
    const bool kept = std::any_of(e, e + count, [](float x) { return x != 0; });
    if (!kept || !std::all_of(g, g + numel, [](float x) { return std::isfinite(x); })) return ctx->set_output(0, grad);
    auto* sum = new_output<float>(ctx, {numel});
    std::copy_n(g, numel, sum);
    float* given = residual.write(ctx);
    for (int64_t i = 0; i < count; ++i) sum[first_ + i] += factor_ * given[i], given[i] = 0;
  }

  int64_t first_;
  float factor_;
};

class Now : public Kernel {
 public:
  using Kernel::Kernel;

 private:
  void run(OpKernelContext* ctx) override {
    // Graph optimisers compute in advance what depends on constants alone, and don't where that fails.
    const bool in_advance = ctx->step_id() == 0 || ctx->step_id() == tensorflow::LogMemory::CONSTANT_FOLDING_STEP_ID;
    expect(!in_advance, "the time is not known in advance");
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now().time_since_epoch();
    Tensor* output;
    ok(ctx->allocate_output(1, {}, &output));
    output->scalar<double>()() = seconds.count();
    ctx->set_output(0, ctx->input(0));
  }
};

class SimdLevel : public Kernel {
 public:
  using Kernel::Kernel;

 private:
  void run(OpKernelContext* ctx) override {
    Tensor level(tensorflow::DT_STRING, TensorShape({}));
    level.scalar<tensorflow::tstring>()() = hvd_quant::level_name(hvd_quant::level());
    ctx->set_output(0, level);
  }
};

class Require : public Kernel {
 public:
  using Kernel::Kernel;

 private:
  void run(OpKernelContext* ctx) override {
    const std::string error = scalar<tensorflow::tstring>(ctx, "error");
    if (!error.empty()) throw PayloadError(error);
    ctx->set_output(0, ctx->input(0));
  }
};

// ---------------------------------------------------------------------------------------------------------- operations

// The shape function for the payloads of the vector that is the first input.
template <class Format>
absl::Status payloads_of(InferenceContext* ctx) {
  return status_of([&] {
    ShapeHandle grad;
    ok(ctx->WithRank(ctx->input(0), 1, &grad));
    const Format format(ctx);
    const auto bounds = bounds_of(ctx);
    const auto numel = ctx->Dim(grad, 0);
    auto length = ctx->UnknownDim();
    if (ctx->ValueKnown(numel)) length = ctx->MakeDim(payloads_bytes(format, cuts_of(bounds, ctx->Value(numel))));
    ctx->set_output(0, ctx->Vector(length));
    ctx->set_output(1, ctx->Vector(std::max<int64_t>(1, int64_t(bounds.size()) / 2)));
  });
}

absl::Status two_thresholds(InferenceContext* ctx) {
  ctx->set_output(0, ctx->Vector(2));
  return absl::OkStatus();
}

absl::Status thresholds_and_sample(InferenceContext* ctx) {
  const auto numel = ctx->NumElements(ctx->input(0));
  ctx->set_output(1, ctx->Vector(ctx->ValueKnown(numel) ? ctx->MakeDim(hvd_quant::sample_size(ctx->Value(numel))) : numel));
  return two_thresholds(ctx);
}

absl::Status one_number(InferenceContext* ctx) {
  ctx->set_output(0, ctx->Vector(1));
  return absl::OkStatus();
}

absl::Status vector_of_numel(InferenceContext* ctx) {
  return status_of([&] {
    ctx->set_output(0, ctx->Vector(attribute<int64_t>(ctx, "numel")));
    ctx->set_output(1, ctx->Vector(ctx->UnknownDim()));
  });
}

#define REGISTER_OF_GRADIENT(NAME, KERNEL, ARGUMENTS, OUTPUTS, SHAPE)                     \
  REGISTER_OP(NAME).Input("grad: float") ARGUMENTS OUTPUTS.SetShapeFn(SHAPE);             \
  REGISTER_OP(NAME "WithResidual")                                                        \
      .Input("grad: float") ARGUMENTS.Input("residual: resource") OUTPUTS.SetIsStateful() \
      .SetShapeFn(SHAPE);                                                                 \
  REGISTER_KERNEL_BUILDER(Name(NAME).Device(DEVICE_CPU), KERNEL);                         \
  REGISTER_KERNEL_BUILDER(Name(NAME "WithResidual").Device(DEVICE_CPU), KERNEL)

#define WORKER .Input("worker: int32")
#define PAYLOADS .Attr("bounds: list(int) = []").Output("payload: uint8").Output("sizes: int64")
#define SIGNS .Attr("block_size: int").Attr("zeros: bool")
#define QSGD .Attr("bits: int").Attr("block_size: int")
#define BLOCKWISE8 .Attr("code: string").Attr("block_size: int")
#define AT_RANDOM .Input("step: int64").Input("rank: int32").Attr("stream: int").Attr("first: int").Attr("phase: int")
#define NO_ATTRIBUTES
#define SPARSE .Attr("slots: list(int)")
#define TOPK SPARSE.Attr("values: string")
#define CAST .Attr("dtype: string").Attr("codec: string")

REGISTER_OF_GRADIENT("HvdQuantOnebitEncode", SignsEncode<Onebit>, WORKER SIGNS, PAYLOADS, payloads_of<Onebit>);
REGISTER_OF_GRADIENT("HvdQuantSignsgdEncode", SignsEncode<SignSgd>, WORKER SIGNS, PAYLOADS, payloads_of<SignSgd>);
REGISTER_OF_GRADIENT("HvdQuantQsgdEncode", FieldsEncode<Qsgd>, WORKER AT_RANDOM QSGD.Attr("norm: string"), PAYLOADS,
                     payloads_of<Qsgd>);
REGISTER_OF_GRADIENT("HvdQuantTerngradMeasure", TernGradMeasure, .Input("clip: double"), .Output("largest: float"), one_number);
REGISTER_OF_GRADIENT("HvdQuantTerngradEncode", FieldsEncode<TernGrad>, WORKER.Input("largest: float") AT_RANDOM, PAYLOADS,
                     payloads_of<TernGrad>);
REGISTER_OF_GRADIENT("HvdQuantNaturalEncode", FieldsEncode<Natural>, WORKER AT_RANDOM, PAYLOADS, payloads_of<Natural>);
REGISTER_OF_GRADIENT("HvdQuantBlockwise8Encode", FieldsEncode<Blockwise8>, WORKER BLOCKWISE8, PAYLOADS,
                     payloads_of<Blockwise8>);
REGISTER_OF_GRADIENT("HvdQuantThresholdEncode", ThresholdEncode, WORKER.Input("step: int64").Attr("tau: float") SPARSE,
                     PAYLOADS, payloads_of<Sparse<Code::threshold>>);
REGISTER_OF_GRADIENT("HvdQuantAdaptiveMeasure", AdaptiveMeasure, .Input("ratio: double").Input("step: int64"),
                     .Output("thresholds: float"), two_thresholds);
REGISTER_OF_GRADIENT("HvdQuantAdaptiveEncode", AdaptiveEncode, WORKER.Input("thresholds: float").Input("step: int64") SPARSE,
                     PAYLOADS, payloads_of<Sparse<Code::adaptive>>);
REGISTER_OF_GRADIENT("HvdQuantTopkMeasure", TopkMeasure, .Input("ratio: double").Input("step: int64"),
                     .Output("thresholds: float"), two_thresholds);
REGISTER_OF_GRADIENT("HvdQuantModelMeasure", ModelMeasure,
                     .Input("ratio: double").Input("step: int64").Input("threshold: float"),
                     .Output("thresholds: float").Output("magnitudes: float"), thresholds_and_sample);
REGISTER_OF_GRADIENT("HvdQuantTopkEncode", TopkEncode, WORKER.Input("thresholds: float").Input("step: int64") TOPK, PAYLOADS,
                     payloads_of<Sparse<Code::topk>>);

REGISTER_OP("HvdQuantCastEncode").Input("grad: float") WORKER CAST PAYLOADS.SetShapeFn(payloads_of<Values>);
REGISTER_KERNEL_BUILDER(Name("HvdQuantCastEncode").Device(DEVICE_CPU), CastEncode);

REGISTER_OP("HvdQuantSimdLevel").Output("level: string").SetShapeFn(tensorflow::shape_inference::ScalarShape);
REGISTER_KERNEL_BUILDER(Name("HvdQuantSimdLevel").Device(DEVICE_CPU), SimdLevel);

REGISTER_OP("HvdQuantLocate")
    .Input("gathered: uint8")
    .Input("rows: int32")
    .Attr("columns: int >= 0")
    .Attr("sizes: list(int)")
    .Output("table: int64")
    .SetShapeFn([](InferenceContext* ctx) {
      return status_of([&] {
        const auto columns = ctx->MakeDim(attribute<int64_t>(ctx, "columns"));
        ctx->set_output(0, ctx->MakeShape({ctx->UnknownDim(), columns, ctx->MakeDim(2)}));
      });
    });
REGISTER_KERNEL_BUILDER(Name("HvdQuantLocate").Device(DEVICE_CPU), Locate);

#define OF_PAYLOADS .Attr("numel: int >= 0").Attr("bounds: list(int) = []").Attr("column: int >= 0 = 0")

// `out`, if there is one, is memory that the sum may take.
#define REGISTER_DECODER(NAME, FORMAT, ATTRIBUTES)                            \
  REGISTER_OP(NAME)                                                           \
      .Input("gathered: uint8")                                               \
      .Input("table: int64")                                                  \
      .Input("scale: float")                                                  \
      .Input("teller: int32")                                                 \
      .Input("out: N * float") ATTRIBUTES OF_PAYLOADS.Attr("name_of: string") \
      .Attr("owner: int = -1")                                                \
      .Attr("N: int >= 0")                                                    \
      .Output("sum: float")                                                   \
      .Output("failure: uint8")                                               \
      .SetShapeFn(vector_of_numel);                                           \
  REGISTER_KERNEL_BUILDER(Name(NAME).Device(DEVICE_CPU), Decode<FORMAT>)

REGISTER_DECODER("HvdQuantOnebitDecodeSum", Onebit, SIGNS);
REGISTER_DECODER("HvdQuantSignsgdDecodeSum", SignSgd, SIGNS);
REGISTER_DECODER("HvdQuantQsgdDecodeSum", Qsgd, QSGD);
REGISTER_DECODER("HvdQuantTerngradDecodeSum", TernGrad, NO_ATTRIBUTES);
REGISTER_DECODER("HvdQuantNaturalDecodeSum", Natural, NO_ATTRIBUTES);
REGISTER_DECODER("HvdQuantBlockwise8DecodeSum", Blockwise8, BLOCKWISE8);
REGISTER_DECODER("HvdQuantThresholdDecodeSum", Sparse<Code::threshold>, SPARSE);
REGISTER_DECODER("HvdQuantAdaptiveDecodeSum", Sparse<Code::adaptive>, SPARSE);
REGISTER_DECODER("HvdQuantTopkDecodeSum", Sparse<Code::topk>, TOPK);
REGISTER_DECODER("HvdQuantCastDecodeSum", Values, CAST);

#define REGISTER_UNDO(NAME, FORMAT, ATTRIBUTES)                              \
  REGISTER_OP(NAME)                                                          \
      .Input("grad: float")                                                  \
      .Input("flags: int32")                                                 \
      .Input("payload: uint8")                                               \
      .Input("residual: resource") ATTRIBUTES.Attr("bounds: list(int) = []") \
      .SetIsStateful()                                                       \
      .SetShapeFn(tensorflow::shape_inference::NoOutputs);                   \
  REGISTER_KERNEL_BUILDER(Name(NAME).Device(DEVICE_CPU), Undo<FORMAT>)

REGISTER_UNDO("HvdQuantOnebitUndo", Onebit, SIGNS);
REGISTER_UNDO("HvdQuantSignsgdUndo", SignSgd, SIGNS);
REGISTER_UNDO("HvdQuantQsgdUndo", Qsgd, QSGD);
REGISTER_UNDO("HvdQuantTerngradUndo", TernGrad, NO_ATTRIBUTES);
REGISTER_UNDO("HvdQuantNaturalUndo", Natural, NO_ATTRIBUTES);
REGISTER_UNDO("HvdQuantBlockwise8Undo", Blockwise8, BLOCKWISE8);
REGISTER_UNDO("HvdQuantThresholdUndo", Sparse<Code::threshold>, SPARSE);
REGISTER_UNDO("HvdQuantAdaptiveUndo", Sparse<Code::adaptive>, SPARSE);
REGISTER_UNDO("HvdQuantTopkUndo", Sparse<Code::topk>, TOPK);

REGISTER_OP("HvdQuantFlags")
    .Input("gathered: uint8")
    .Input("table: int64")
    .Attr("codec: string") OF_PAYLOADS.Output("flags: int32")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);
REGISTER_KERNEL_BUILDER(Name("HvdQuantFlags").Device(DEVICE_CPU), Flags);

REGISTER_OP("HvdQuantByOwner")
    .Input("payloads: N * uint8")
    .Input("sizes: N * int64")
    .Attr("N: int >= 1")
    .Output("sent: uint8")
    .Output("splits: int32")
    .SetShapeFn([](InferenceContext* ctx) {
      ctx->set_output(0, ctx->Vector(ctx->UnknownDim()));
      ctx->set_output(1, ctx->Vector(ctx->UnknownDim()));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("HvdQuantByOwner").Device(DEVICE_CPU), ByOwner);

REGISTER_OP("HvdQuantInstead")
    .Input("payload: uint8")
    .Input("failure: uint8")
    .Output("sent: uint8")
    .SetShapeFn([](InferenceContext* ctx) {
      ctx->set_output(0, ctx->Vector(ctx->UnknownDim()));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("HvdQuantInstead").Device(DEVICE_CPU), Instead);

REGISTER_OP("HvdQuantWithoutFlags")
    .Input("payload: uint8")
    .Output("clean: uint8")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);
REGISTER_KERNEL_BUILDER(Name("HvdQuantWithoutFlags").Device(DEVICE_CPU), WithoutFlags);

REGISTER_OP("HvdQuantRestore")
    .Input("grad: float")
    .Input("decoded: float")
    .Input("residual: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);
REGISTER_KERNEL_BUILDER(Name("HvdQuantRestore").Device(DEVICE_CPU), Restore);

REGISTER_OP("HvdQuantGiveBack")
    .Input("grad: float")
    .Input("residual: resource")
    .Attr("first: int")
    .Attr("factor: float")
    .Output("sum: float")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);
REGISTER_KERNEL_BUILDER(Name("HvdQuantGiveBack").Device(DEVICE_CPU), GiveBack);

// Stateless, so that a tf.function runs it as soon as x is there, and not after what else is stateful.
REGISTER_OP("HvdQuantNow")
    .Input("x: T")
    .Attr("T: type")
    .Output("y: T")
    .Output("seconds: double")
    .SetShapeFn([](InferenceContext* ctx) {
      ctx->set_output(0, ctx->input(0));
      ctx->set_output(1, ctx->Scalar());
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("HvdQuantNow").Device(DEVICE_CPU), Now);

REGISTER_OP("HvdQuantRequire")
    .Input("x: T")
    .Input("error: string")
    .Attr("T: type")
    .Output("y: T")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);
REGISTER_KERNEL_BUILDER(Name("HvdQuantRequire").Device(DEVICE_CPU), Require);

}  // namespace

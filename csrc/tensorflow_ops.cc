// TensorFlow's view of the kernels: arguments checked, variables locked, memory and threads lent. The caller is
// hvd_quant/ops/tensorflow.py.
//
// An encoder or measure is two operations with one kernel. The one with a residual reads or changes a variable, so it
// is stateful, which keeps the graph optimiser from dropping or merging it. The one without is a plain function: if it
// were stateful too, a tf.function would run it one after another with all else that is stateful without a variable.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/log_memory.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

#include "kernels/cast.h"
#include "kernels/measure.h"
#include "kernels/onebit.h"
#include "kernels/restore.h"
#include "kernels/sparse.h"

namespace {

using hvd_quant::Bytes;
using hvd_quant::Cast;
using hvd_quant::Code;
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
int64_t slots_of(Context* ctx) {
  const int64_t slots = attribute<int64_t>(ctx, "slots");
  expect(slots > 0 && slots % 8 == 0 && slots < int64_t{1} << 32, "slots is ", slots,
         ", expected a positive multiple of 8 below 2^32");
  return slots;
}

template <class Context>
Cast cast_of(Context* ctx) {
  const auto dtype = attribute<std::string>(ctx, "dtype");
  expect(dtype == "float32" || dtype == "float16" || dtype == "bfloat16", "dtype is ", dtype,
         ", expected float32, float16 or bfloat16");
  return dtype == "float32" ? Cast::float32 : dtype == "float16" ? Cast::float16 : Cast::bfloat16;
}

// The code itself, but for topk, which has two by its attribute `values`.
template <Code code, class Context>
Code code_of(Context* ctx) {
  if (code != Code::topk) return code;
  const auto values = attribute<std::string>(ctx, "values");
  expect(values == "float32" || values == "float16", "values is ", values, ", expected float32 or float16");
  return values == "float32" ? Code::topk : Code::topk_half;
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
  expect(t.dims() == 1, name, " has ", t.dims(), " dimensions, expected a flat vector: pass tf.reshape(", name,
         ", [-1])");
}

const Tensor& vector(OpKernelContext* ctx, const char* name) {
  const Tensor& tensor = input(ctx, name);
  check_vector(tensor, name);
  return tensor;
}

template <class T>
T* new_output(OpKernelContext* ctx, const TensorShape& shape) {
  Tensor* output;
  ok(ctx->allocate_output(0, shape, &output));
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

// The variable that is an operation's last input, locked while this lives: a flat fp32 vector of `numel` entries.
class Residual {
 public:
  Residual(OpKernelContext* ctx, int64_t numel) {
    const char* missing = "residual is a variable without a value, expected an initialized one";
    expect(LookupResource(ctx, tensorflow::HandleFromInput(ctx, ctx->num_inputs() - 1), &variable_).ok(), missing);
    lock_ = Lock(*variable_->mu());
    expect(variable_->is_initialized, missing);
    const Tensor& held = *variable_->tensor();
    expect(held.dtype() == tensorflow::DT_FLOAT, "residual is ", tensorflow::DataTypeString(held.dtype()),
           ", expected float");
    check_vector(held, "residual");
    expect(held.NumElements() == numel, "residual has ", held.NumElements(), " entries, expected as many as grad: ",
           numel);
  }

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

class OnebitEncode : public OfGradient {
 public:
  explicit OnebitEncode(OpKernelConstruction* ctx) : OfGradient(ctx) {
    ctx->SetStatus(status_of([&] {
      block_size_ = block_size_of(ctx);
      zeros_ = attribute<bool>(ctx, "zeros");
    }));
  }

 private:
  void run(OpKernelContext* ctx, const float* grad, Residual* residual, int64_t numel) override {
    auto* payload = new_output<uint8_t>(ctx, {hvd_quant::onebit_payload_bytes(numel, block_size_, zeros_)});
    float* e = residual ? residual->write(ctx) : nullptr;
    hvd_quant::onebit_encode(grad, e, numel, block_size_, zeros_, payload, threads(ctx));
  }

  int64_t block_size_;
  bool zeros_;
};

template <Code code>
class SparseEncode : public OfGradient {
 public:
  explicit SparseEncode(OpKernelConstruction* ctx) : OfGradient(ctx) {
    ctx->SetStatus(status_of([&] {
      code_ = code_of<code>(ctx);
      slots_ = slots_of(ctx);
      if (code != Code::threshold) return;
      const hvd_quant::DenormalGuard guard;
      tau_ = attribute<float>(ctx, "tau");
      expect(tau_ > 0 && std::isfinite(tau_), "tau is ", tau_, ", expected a positive number that fp32 holds");
    }));
  }

 private:
  void run(OpKernelContext* ctx, const float* grad, Residual* residual, int64_t numel) override {
    float tau[2] = {tau_, -tau_};
    if (code != Code::threshold) {
      const hvd_quant::DenormalGuard guard;  // the smallest threshold is a denormal
      const Tensor& thresholds = vector(ctx, "thresholds");
      expect(thresholds.NumElements() == 2, "thresholds has ", thresholds.NumElements(), " entries, expected 2");
      std::copy_n(thresholds.unaligned_flat<float>().data(), 2, tau);
      expect(tau[0] > 0 && tau[1] < 0, "thresholds is (", tau[0], ", ", tau[1],
             "), expected a positive and a negative one");
    }
    const auto step = scalar<int64_t>(ctx, "step");
    auto* payload = new_output<uint8_t>(ctx, {SparseLayout(code_, numel, slots_).payload_bytes});
    float* e = residual ? residual->write(ctx) : nullptr;
    hvd_quant::sparse_encode(code_, grad, e, numel, tau[0], tau[1], slots_, step, payload, threads(ctx));
  }

  Code code_;
  int64_t slots_;
  float tau_ = 0;
};

using ThresholdEncode = SparseEncode<Code::threshold>;
using AdaptiveEncode = SparseEncode<Code::adaptive>;
using TopkEncode = SparseEncode<Code::topk>;

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

using AdaptiveMeasure = Measure<hvd_quant::adaptive_measure>;
using TopkMeasure = Measure<hvd_quant::topk_measure>;

class CastEncode : public Kernel {
 public:
  explicit CastEncode(OpKernelConstruction* ctx) : Kernel(ctx) {
    ctx->SetStatus(status_of([&] {
      type_ = cast_of(ctx);
      codec_ = attribute<std::string>(ctx, "codec");
    }));
  }

 private:
  void run(OpKernelContext* ctx) override {
    const Tensor& grad = vector(ctx, "grad");
    auto* payload = new_output<uint8_t>(ctx, {hvd_quant::cast_payload_bytes(type_, grad.NumElements())});
    hvd_quant::cast_encode(type_, codec_, grad.unaligned_flat<float>().data(), grad.NumElements(), payload, threads(ctx));
  }

  Cast type_;
  std::string codec_;
};

// What an allgather returned, cut into the workers' payloads.
std::vector<Bytes> payloads_of(OpKernelContext* ctx) {
  const Tensor& gathered = vector(ctx, "gathered");
  const auto world = scalar<int32_t>(ctx, "world");
  expect(world > 0, "world is ", world, ", expected the number of workers");
  return hvd_quant::split({gathered.unaligned_flat<uint8_t>().data(), gathered.NumElements()}, world);
}

// An operation on what an allgather returned: payloads of `numel` entries. Its errors begin with the parameter's name.
class OfPayloads : public Kernel {
 public:
  explicit OfPayloads(OpKernelConstruction* ctx) : Kernel(ctx) {
    ctx->SetStatus(status_of([&] {
      numel_ = attribute<int64_t>(ctx, "numel");
      name_ = attribute<std::string>(ctx, "name_of");
    }));
  }

 protected:
  int64_t numel_;

 private:
  void run(OpKernelContext* ctx) final {
    try {
      run(ctx, payloads_of(ctx));
    } catch (const PayloadError& error) {
      throw PayloadError(name_.empty() ? error.what() : name_ + ": " + error.what());
    }
  }
  virtual void run(OpKernelContext* ctx, const std::vector<Bytes>& payloads) = 0;

  std::string name_;
};

// Tells also of damage that a payload's header and checksum show, so that what was encoded can be taken back before a decoder
// says what is wrong.
class Flags : public Kernel {
 public:
  explicit Flags(OpKernelConstruction* ctx) : Kernel(ctx) {
    OP_REQUIRES_OK(ctx, status_of([&] {
                     codec_ = attribute<std::string>(ctx, "codec");
                     numel_ = attribute<int64_t>(ctx, "numel");
                   }));
  }

 private:
  void run(OpKernelContext* ctx) override {
    constexpr int32_t kDamaged = 4;
    int32_t flags = 0;
    try {
      for (const Bytes& payload : payloads_of(ctx)) {
        flags |= hvd_quant::check_header(payload, codec_, numel_);
        hvd_quant::check_sum(payload);
      }
    } catch (const PayloadError&) {
      flags |= kDamaged;
    }
    *new_output<int32_t>(ctx, {}) = flags;
  }

  std::string codec_;
  int64_t numel_;
};

class Decode : public OfPayloads {
 public:
  using OfPayloads::OfPayloads;

 private:
  void run(OpKernelContext* ctx, const std::vector<Bytes>& payloads) final {
    const auto scale = scalar<float>(ctx, "scale");
    const TensorShape shape({numel_});
    std::vector<int> reused;
    for (int i = 3; i < ctx->num_inputs(); ++i) {
      expect(ctx->input(i).shape() == shape, "out has shape ", ctx->input(i).shape().DebugString(), ", expected ",
             shape.DebugString());
      reused.push_back(i);
    }
    Tensor* out;
    ok(ctx->forward_input_or_allocate_output(reused, 0, shape, &out));
    decode(payloads, scale, out->flat<float>().data(), threads(ctx));
  }
  virtual void decode(const std::vector<Bytes>& payloads, float scale, float* out, const Parallel& parallel) = 0;
};

class OnebitDecode : public Decode {
 public:
  explicit OnebitDecode(OpKernelConstruction* ctx) : Decode(ctx) {
    ctx->SetStatus(status_of([&] {
      block_size_ = block_size_of(ctx);
      zeros_ = attribute<bool>(ctx, "zeros");
    }));
  }

 private:
  void decode(const std::vector<Bytes>& payloads, float scale, float* out, const Parallel& parallel) override {
    hvd_quant::onebit_decode_sum(payloads, numel_, block_size_, zeros_, scale, out, parallel);
  }

  int64_t block_size_;
  bool zeros_;
};

template <Code code>
class SparseDecode : public Decode {
 public:
  explicit SparseDecode(OpKernelConstruction* ctx) : Decode(ctx) {
    ctx->SetStatus(status_of([&] {
      code_ = code_of<code>(ctx);
      slots_ = slots_of(ctx);
    }));
  }

 private:
  void decode(const std::vector<Bytes>& payloads, float scale, float* out, const Parallel& parallel) override {
    hvd_quant::sparse_decode_sum(code_, payloads, numel_, slots_, scale, out, parallel);
  }

  Code code_;
  int64_t slots_;
};

using ThresholdDecode = SparseDecode<Code::threshold>;
using AdaptiveDecode = SparseDecode<Code::adaptive>;
using TopkDecode = SparseDecode<Code::topk>;

class CastDecode : public Decode {
 public:
  explicit CastDecode(OpKernelConstruction* ctx) : Decode(ctx) {
    ctx->SetStatus(status_of([&] {
      type_ = cast_of(ctx);
      codec_ = attribute<std::string>(ctx, "codec");
    }));
  }

 private:
  void decode(const std::vector<Bytes>& payloads, float scale, float* out, const Parallel& parallel) override {
    hvd_quant::cast_decode_sum(type_, codec_, payloads, numel_, scale, out, parallel);
  }

  Cast type_;
  std::string codec_;
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

// The shape function for a payload of bytes(ctx, numel) bytes, of the vector that is the first input.
template <class PayloadBytes>
constexpr auto payload_of(const PayloadBytes& bytes) {
  return [bytes](InferenceContext* ctx) {
    return status_of([&] {
      ShapeHandle grad;
      ok(ctx->WithRank(ctx->input(0), 1, &grad));
      const auto numel = ctx->Dim(grad, 0);
      const auto length = ctx->ValueKnown(numel) ? ctx->MakeDim(bytes(ctx, ctx->Value(numel))) : ctx->UnknownDim();
      ctx->set_output(0, ctx->Vector(length));
    });
  };
}

constexpr auto onebit_payload = payload_of([](InferenceContext* ctx, int64_t numel) {
  return hvd_quant::onebit_payload_bytes(numel, block_size_of(ctx), attribute<bool>(ctx, "zeros"));
});

template <Code code>
constexpr auto sparse_payload = payload_of([](InferenceContext* ctx, int64_t numel) {
  return SparseLayout(code_of<code>(ctx), numel, slots_of(ctx)).payload_bytes;
});

constexpr auto cast_payload = payload_of([](InferenceContext* ctx, int64_t numel) {
  return hvd_quant::cast_payload_bytes(cast_of(ctx), numel);
});

absl::Status two_thresholds(InferenceContext* ctx) {
  ctx->set_output(0, ctx->Vector(2));
  return absl::OkStatus();
}

absl::Status vector_of_numel(InferenceContext* ctx) {
  return status_of([&] { ctx->set_output(0, ctx->Vector(attribute<int64_t>(ctx, "numel"))); });
}

#define REGISTER_OF_GRADIENT(NAME, KERNEL, ARGUMENTS, OUTPUT, SHAPE)                           \
  REGISTER_OP(NAME).Input("grad: float") ARGUMENTS.Output(OUTPUT).SetShapeFn(SHAPE);           \
  REGISTER_OP(NAME "WithResidual").Input("grad: float") ARGUMENTS.Input("residual: resource")  \
      .Output(OUTPUT).SetIsStateful().SetShapeFn(SHAPE);                                       \
  REGISTER_KERNEL_BUILDER(Name(NAME).Device(DEVICE_CPU), KERNEL);                              \
  REGISTER_KERNEL_BUILDER(Name(NAME "WithResidual").Device(DEVICE_CPU), KERNEL)

REGISTER_OF_GRADIENT("HvdQuantOnebitEncode", OnebitEncode,
                     .Attr("block_size: int").Attr("zeros: bool"),
                     "payload: uint8", onebit_payload);
REGISTER_OF_GRADIENT("HvdQuantThresholdEncode", ThresholdEncode,
                     .Input("step: int64").Attr("tau: float").Attr("slots: int"),
                     "payload: uint8", sparse_payload<Code::threshold>);
REGISTER_OF_GRADIENT("HvdQuantAdaptiveMeasure", AdaptiveMeasure,
                     .Input("ratio: double").Input("step: int64"),
                     "thresholds: float", two_thresholds);
REGISTER_OF_GRADIENT("HvdQuantAdaptiveEncode", AdaptiveEncode,
                     .Input("thresholds: float").Input("step: int64").Attr("slots: int"),
                     "payload: uint8", sparse_payload<Code::adaptive>);
REGISTER_OF_GRADIENT("HvdQuantTopkMeasure", TopkMeasure,
                     .Input("ratio: double").Input("step: int64"),
                     "thresholds: float", two_thresholds);
REGISTER_OF_GRADIENT("HvdQuantTopkEncode", TopkEncode,
                     .Input("thresholds: float").Input("step: int64").Attr("slots: int").Attr("values: string"),
                     "payload: uint8", sparse_payload<Code::topk>);

REGISTER_OP("HvdQuantCastEncode")
    .Input("grad: float")
    .Attr("dtype: string")
    .Attr("codec: string")
    .Output("payload: uint8")
    .SetShapeFn(cast_payload);
REGISTER_KERNEL_BUILDER(Name("HvdQuantCastEncode").Device(DEVICE_CPU), CastEncode);

// `out`, if there is one, is memory that the sum may take.
#define REGISTER_DECODER(NAME, KERNEL, ATTRIBUTES)                                              \
  REGISTER_OP(NAME).Input("gathered: uint8").Input("world: int32").Input("scale: float")        \
      .Input("out: N * float") ATTRIBUTES.Attr("numel: int >= 0").Attr("name_of: string")       \
      .Attr("N: int >= 0").Output("sum: float").SetShapeFn(vector_of_numel);                    \
  REGISTER_KERNEL_BUILDER(Name(NAME).Device(DEVICE_CPU), KERNEL)

REGISTER_DECODER("HvdQuantOnebitDecodeSum", OnebitDecode, .Attr("block_size: int").Attr("zeros: bool"));
REGISTER_DECODER("HvdQuantThresholdDecodeSum", ThresholdDecode, .Attr("slots: int"));
REGISTER_DECODER("HvdQuantAdaptiveDecodeSum", AdaptiveDecode, .Attr("slots: int"));
REGISTER_DECODER("HvdQuantTopkDecodeSum", TopkDecode, .Attr("slots: int").Attr("values: string"));
REGISTER_DECODER("HvdQuantCastDecodeSum", CastDecode, .Attr("dtype: string").Attr("codec: string"));

REGISTER_OP("HvdQuantFlags")
    .Input("gathered: uint8")
    .Input("world: int32")
    .Attr("codec: string")
    .Attr("numel: int >= 0")
    .Output("flags: int32")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);
REGISTER_KERNEL_BUILDER(Name("HvdQuantFlags").Device(DEVICE_CPU), Flags);

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

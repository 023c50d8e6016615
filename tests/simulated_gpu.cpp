// CUDA devices in the memory of the host. Operators on their tensors run on the CPU, through one fallback.
//
// As on a GPU: operands on different devices are an error, random numbers come from the generator of the device, and a graph records
// operators and addresses. `simulated_gpu.py` has the part in Python.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;
using Values = torch::jit::Stack;

constexpr auto GPU = DeviceType::CUDA;
const Device CPU(DeviceType::CPU);
const c10::DispatchKeySet ON_GPU(c10::DispatchKey::CUDA), ON_CPU(c10::DispatchKey::CPU);
const auto GRADIENTS = c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
DeviceIndex devices = 1;
thread_local DeviceIndex current = 0;
std::mutex lock;

// ---- Memory ------------------------------------------------------------------------------------------------------------------

std::atomic<int64_t> used{0}, peak{0};  // bytes of tensors on all devices, now and at most

void count(int64_t bytes) {
  const int64_t now = used += bytes;
  for (int64_t before = peak; now > before && !peak.compare_exchange_weak(before, now);) {
  }
}

struct Block {
  int64_t bytes;
  void* own;            // to be freed
  at::Tensor borrowed;  // or a result of the CPU, whose memory it is
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  count(-block->bytes);
  std::free(block->own);
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    count(bytes);
    return {data, new Block{static_cast<int64_t>(bytes), data, {}}, &release, Device(GPU, current)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Memory memory;

std::set<const void*> pinned;

void release_pinned(void* data) {
  std::lock_guard<std::mutex> guard(lock);
  pinned.erase(data);
  std::free(data);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::aligned_alloc(64, bytes / 64 * 64 + 64);
    std::lock_guard<std::mutex> guard(lock);
    pinned.insert(data);
    return {data, data, &release_pinned, CPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PinnedMemory pinned_memory;

// ---- What PyTorch asks of a backend ------------------------------------------------------------------------------------------

struct Guard final : c10::impl::NoOpDeviceGuardImpl<GPU> {
  Device exchangeDevice(Device to) const override { return Device(GPU, std::exchange(current, to.index())); }
  Device getDevice() const override { return Device(GPU, current); }
  void setDevice(Device to) const override { current = to.index(); }
  void uncheckedSetDevice(Device to) const noexcept override { current = to.index(); }
  c10::Stream getStream(Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return devices; }
};

struct OnDevice {  // makes a device current for a scope
  DeviceIndex before = current;
  explicit OnDevice(std::optional<Device> device) {
    if (device && device->has_index()) current = device->index();
  }
  ~OnDevice() { current = before; }
};

struct Generator final : c10::GeneratorImpl {
  at::Generator host;  // draws the numbers

  Generator(DeviceIndex index, at::Generator host)
      : GeneratorImpl(Device(GPU, index), ON_GPU), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new Generator(device_.index(), host.clone()); }
};

at::Generator& of_host(const at::Generator& generator) { return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host; }

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return devices; }
  DeviceIndex deviceCount() const override { return devices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex to) const override { current = to; }
  DeviceIndex exchangeDevice(DeviceIndex to) const override { return std::exchange(current, to); }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return exchangeDevice(to); }
  void deviceSynchronize(DeviceIndex) const override {}
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(lock);
    return pinned.count(data) > 0;
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index, at::detail::createCPUGenerator());
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    static std::map<DeviceIndex, at::Generator> all;
    std::lock_guard<std::mutex> guard(lock);
    index = index < 0 ? current : index;
    return all.try_emplace(index, getNewGenerator(index)).first->second;
  }
};

struct Timer final : c10d::Timer {
  explicit Timer(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override { return getTimeRef(end) - getTimeRef(start); }
};

// ---- Tensors of the device as tensors of the CPU with the same memory, and back -----------------------------------------------

class Host {
 public:
  std::optional<Device> device;  // of the operands

  at::Tensor tensor(const at::Tensor& on) {
    if (!on.defined() || !on.is_cuda()) return on;
    TORCH_CHECK(!device || *device == on.device(), "Expected all tensors to be on the same device, but found ", *device, " and ",
                on.device());
    device = on.device();
    for (size_t i = 0; i < operands.size(); i++)
      if (operands[i].is_same(on)) return taken[i];
    auto host = at::detail::make_tensor<c10::TensorImpl>(storage(on.storage()), ON_CPU, on.dtype());
    auto* implementation = host.unsafeGetTensorImpl();
    implementation->set_sizes_and_strides(on.sizes(), on.strides(), on.storage_offset());
    if (on.unsafeGetTensorImpl()->is_wrapped_number()) implementation->set_wrapped_number(true);
    if (on.is_conj()) host._set_conj(true);
    if (on.is_neg()) host._set_neg(true);
    operands.push_back(on);
    taken.push_back(host);
    return host;
  }

  at::Tensor result(const at::Tensor& host) {  // the operand, a view of it, or a new tensor
    if (!host.defined() || !host.device().is_cpu()) return host;
    for (size_t i = 0; i < taken.size(); i++)
      if (taken[i].is_same(host)) return operands[i];
    auto on = at::detail::make_tensor<c10::TensorImpl>(storage_of(host), ON_GPU, host.dtype());
    on.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    return on;
  }

  void resize_operands() {  // as the operator has resized them
    for (size_t i = 0; i < taken.size(); i++) {
      auto* on = operands[i].unsafeGetTensorImpl();
      const auto &host = taken[i].storage(), &storage = operands[i].storage();
      if (host.data() != storage.data() || host.nbytes() != storage.nbytes()) on->set_storage_keep_dtype(storage_of(taken[i]));
      if (taken[i].sizes() != on->sizes() || taken[i].strides() != on->strides())
        on->set_sizes_and_strides(taken[i].sizes(), taken[i].strides(), taken[i].storage_offset());
    }
  }

 private:
  std::vector<at::Tensor> operands, taken;                      // of the device, and as tensors of the CPU
  std::vector<std::pair<c10::Storage, c10::Storage>> storages;  // likewise

  c10::Storage storage(const c10::Storage& on) {
    for (auto& [first, second] : storages)
      if (first.is_alias_of(on)) return second;
    auto release_reference = [](void* context) { delete static_cast<c10::Storage*>(context); };
    c10::DataPtr data(on.mutable_data(), new c10::Storage(on), release_reference, CPU);
    c10::Storage host(c10::Storage::use_byte_size_t(), on.nbytes(), std::move(data), c10::GetAllocator(DeviceType::CPU), true);
    storages.emplace_back(on, host);
    return host;
  }

  c10::Storage storage_of(const at::Tensor& host) {
    for (auto& [on, second] : storages)
      if (second.is_alias_of(host.storage()) && second.data() == on.data()) return on;
    const auto bytes = host.storage().nbytes();
    count(bytes);
    c10::DataPtr data(host.storage().mutable_data(), new Block{static_cast<int64_t>(bytes), nullptr, host}, &release, *device);
    return {c10::Storage::use_byte_size_t(), bytes, std::move(data), &memory, true};
  }
};

// ---- Graphs ------------------------------------------------------------------------------------------------------------------

struct Graph {
  std::vector<std::function<void()>> operations;
  std::vector<std::pair<at::Tensor, std::string>> before;  // what the capture writes to, and the bytes that were there

  void save(const at::Tensor& host) {
    for (auto& [tensor, bytes] : before)
      if (tensor.storage().data() == host.storage().data()) return;
    before.emplace_back(host, std::string(static_cast<const char*>(host.storage().data()), host.storage().nbytes()));
  }

  void restore() {  // a capture computes nothing
    for (auto& [tensor, bytes] : before) std::memcpy(tensor.storage().mutable_data(), bytes.data(), bytes.size());
    before.clear();
  }
};
Graph* capturing = nullptr;

// ---- Operators ---------------------------------------------------------------------------------------------------------------

py::object* on_wait = nullptr;  // called with the name of an operator for which the host waits

const std::set<std::string> TRANSFERS = {"aten::copy_", "aten::_copy_from"};
const std::set<std::string> TAKE_INDICES = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_",
                                            "aten::_index_put_impl_"};
const std::set<std::string> WAIT = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero",
                                    "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"};

IValue with_tensors(const IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList()) {
    c10::List<c10::List<at::Tensor>> lists;
    for (const IValue& inner : value.toListRef()) lists.push_back(with_tensors(inner, change).toTensorList());
    return lists;
  }
  return value;
}

Values run(const c10::OperatorHandle& op, Values values, DeviceIndex index) {
  c10::impl::ExcludeDispatchKeyGuard no_gradients(GRADIENTS);
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) {
    op.callBoxed(&values);
    return values;
  }
  static std::mutex drawing;  // from the generator of the device, unless one is given
  std::lock_guard<std::mutex> guard(drawing);
  auto host = at::detail::getDefaultCPUGenerator();
  auto& device = of_host(at::detail::getCUDAHooks().getDefaultGenerator(index));
  const auto before = host.get_state();
  host.set_state(device.get_state());
  op.callBoxed(&values);
  device.set_state(host.get_state());
  host.set_state(before);
  return values;
}

void run_on_the_cpu(const c10::OperatorHandle& op, Values* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const size_t count_of_arguments = schema.arguments().size();
  auto given = torch::jit::last(*stack, count_of_arguments).vec();
  torch::jit::drop(*stack, count_of_arguments);

  Host host;
  Values taken;
  std::optional<Device> other;  // of an operand that has a dimension and is not on the device
  bool waits = WAIT.count(name), writes = false, is_view = false;
  const bool is_transfer = TRANSFERS.count(name);
  for (size_t i = 0; i < count_of_arguments; i++) {
    const bool are_indices = i == 1 && TAKE_INDICES.count(name);
    if (const auto* alias = schema.arguments()[i].alias_info()) (alias->isWrite() ? writes : is_view) = true;
    taken.push_back(with_tensors(given[i], [&](const at::Tensor& tensor) {
      if (tensor.defined() && !tensor.is_cuda() && tensor.dim() > 0 && !are_indices && !is_transfer) other = tensor.device();
      waits |= tensor.defined() && tensor.is_cuda() && are_indices && (tensor.dtype() == at::kBool || tensor.dtype() == at::kByte);
      return host.tensor(tensor);
    }));
    if (given[i].isGenerator() && given[i].toGenerator().device().is_cuda()) taken.back() = of_host(given[i].toGenerator());
    if (given[i].isDevice()) {
      if (!host.device && given[i].toDevice().has_index()) host.device = given[i].toDevice();
      taken.back() = CPU;
    }
  }
  TORCH_CHECK(!host.device || !other, "Expected all tensors to be on the same device, but ", name, " found ", *host.device, " and ",
              *other);
  if (!host.device) host.device = Device(GPU, current);

  const bool to_the_host = is_transfer && !given[0].toTensor().is_cuda();
  if (waits || to_the_host) {
    TORCH_CHECK(!capturing, "CUDA error: operation not permitted when stream is capturing (", name, ")");
    if (on_wait != nullptr) {
      py::gil_scoped_acquire gil;
      (*on_wait)(name);
    }
  }

  if (capturing && writes)
    for (size_t i = 0; i < count_of_arguments; i++)
      if (const auto* alias = schema.arguments()[i].alias_info(); alias && alias->isWrite())
        with_tensors(taken[i], [](const at::Tensor& tensor) { capturing->save(tensor); return tensor; });
  const auto index = host.device->index();
  const auto results = run(op, taken, index);
  if (writes) host.resize_operands();
  if (capturing && !is_view)
    capturing->operations.push_back([op, taken, index, writes, results] {
      const auto again = run(op, taken, index);
      for (size_t i = 0; i < results.size() && !writes; i++) {  // into the memory of the capture
        std::vector<at::Tensor> to;
        with_tensors(results[i], [&](const at::Tensor& tensor) { to.push_back(tensor); return tensor; });
        auto next = to.begin();
        with_tensors(again[i], [&](const at::Tensor& tensor) { if (tensor.defined()) next->copy_(tensor); next++; return tensor; });
      }
    });
  const auto on_device = [&](const at::Tensor& tensor) { return to_the_host ? tensor : host.result(tensor); };
  for (const auto& result : results) torch::jit::push(*stack, with_tensors(result, on_device));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice guard(device);
  return at::detail::empty_generic(size, &memory, ON_GPU, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<Device> device, std::optional<bool>) {
  OnDevice guard(device);
  return at::detail::empty_strided_generic(size, stride, &memory, ON_GPU, c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
  return set_storage(tensor, std::move(storage), 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void resize_storage(const at::Tensor& of, size_t bytes) {
  auto* storage = of.storage().unsafeGetStorageImpl();
  OnDevice guard(of.device());
  auto data = memory.allocate(bytes);
  std::memcpy(data.mutable_get(), storage->data(), std::min(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

int64_t by_products(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                    std::optional<double>, bool) {
  return 0;  // attention without a fused kernel
}

void record_stream(at::Tensor&, c10::Stream) {}

void run_on_the_cpu_too(torch::Library& library, std::initializer_list<const char*> names) {
  for (const char* name : names) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_the_cpu>());
}

void run_collectives_on_the_cpu() {  // instead of by the backend for CUDA; the dispatcher warns that they are replaced
  static torch::Library library(torch::Library::IMPL, "c10d", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  static bool is_done = false;
  if (std::exchange(is_done, true)) return;
  run_on_the_cpu_too(library, {"allreduce_", "broadcast_", "reduce_", "gather_", "scatter_", "send", "recv_", "barrier",
                               "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_",
                               "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
                               "alltoall_", "alltoall_base_"});
}

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, ::Timer)
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("_fused_sdp_choice", &by_products);
  library.impl("record_stream", &record_stream);
  run_on_the_cpu_too(library, {"copy_"});  // PyTorch has one for all backends, which needs a kernel of each
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Graph>(module, "Graph")
      .def(py::init<>())
      .def("begin", [](Graph& graph) { capturing = &graph; })
      .def("end", [](Graph& graph) { graph.restore(); capturing = nullptr; })
      .def("save", &Graph::save)
      .def("add", [](Graph& graph, py::function function) {
        auto* kept = new py::function(std::move(function));
        graph.operations.push_back([kept] { py::gil_scoped_acquire gil; (*kept)(); });
      })
      .def("replay", [](Graph& graph) {
        at::NoGradGuard no_gradients;
        for (auto& operation : graph.operations) operation();
      });
  module.def("capturing", [] { return capturing; }, py::return_value_policy::reference);
  module.def("on_wait", [](const py::object& function) { on_wait = new py::object(function); });
  module.def("on_host", [](const at::Tensor& tensor) { return Host().tensor(tensor); });
  module.def("run_collectives_on_the_cpu", &run_collectives_on_the_cpu);
  module.def("resize_storage", &resize_storage);
  module.def("default_generator", [](DeviceIndex index) { return at::detail::getCUDAHooks().getDefaultGenerator(index); });
  module.def("memory_allocated", [] { return used.load(); });
  module.def("max_memory_allocated", [] { return peak.load(); });
  module.def("reset_peak", [] { peak = used.load(); });
  module.def("set_devices", [](DeviceIndex number) { devices = number; });
  module.def("current", [] { return current; });
  module.def("set_current", [](DeviceIndex index) { current = index; });
}

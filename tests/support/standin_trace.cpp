// What the stand-in device was asked for, in the host's order: who does it, with which memory, and what comes before it. By this,
// race_clock.py finds what nothing orders.
//
// While a trace is kept, copies and collectives are made at once: training goes on alike whatever is left out of what orders them,
// and the trace alone tells.
#include "standin_device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <pybind11/stl.h>
#include <unistd.h>

namespace standin {

std::atomic<bool> tracing{false};

namespace {

using Entry = std::tuple<int, std::string, std::string, std::string, std::vector<Access>, std::string, std::string>;

constexpr int kFrames = 6;
std::mutex entries_lock;
std::vector<Entry> entries;
std::string package;
std::optional<at::CallbackHandle> observer;

// The innermost calls of the package that this thread is in.
std::string where_now() {
  pybind11::gil_scoped_acquire with_python;
  std::string found;
  int count = 0;
  auto frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame && count < kFrames) {
    auto code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    if (file && !strncmp(file, package.data(), package.size()))
      found += c10::str(count++ ? " < " : "", file + package.size(), ":", PyFrame_GetLineNumber(frame), " ",
                        PyUnicode_AsUTF8(code->co_name));
    auto caller = PyFrame_GetBack(frame);
    Py_DECREF(code);
    Py_DECREF(frame);
    frame = caller;
  }
  Py_XDECREF(frame);
  return found;
}

// Operators of the host, some of whose memory is pinned. What the stand-in's own operators do there, no host would.
std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function) {
  const auto name = function.operator_name();
  if (!tracing || computing || !name) return nullptr;
  const auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op || !is_a_leaf(*op)) return nullptr;
  std::vector<Access> accesses;
  bool is_elsewhere = false;
  note_values(accesses, function.inputs().begin(), op->schema().arguments(), false, [&](const at::Tensor& tensor) {
    is_elsewhere |= !tensor.device().is_cpu();
    return tensor.device().is_cpu() && tensor.has_storage() && is_pinned(tensor.const_data_ptr());
  });
  if (!is_elsewhere && !accesses.empty()) trace("do", "", "", std::move(accesses), name->name);
  return nullptr;
}

} // namespace

// What reads or writes memory itself, and leaves it to no other operator, which would be seen too.
bool is_a_leaf(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  if (schema.name() == "aten::copy_") return true;
  if (schema.name() == "aten::set_" || schema.name() == "aten::resize_") return false;
  const bool is_view = !schema.is_mutable() && std::any_of(schema.returns().begin(), schema.returns().end(),
                                                           [](auto& each) { return each.alias_info() != nullptr; });
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) && !is_view;
}

void note_access(std::vector<Access>& accesses, const at::Tensor& tensor, bool writes) {
  if (!tensor.has_storage() || !tensor.storage().data() || !tensor.numel()) return;
  const auto begin = uint64_t(tensor.storage().data());
  const auto end = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
  accesses.emplace_back(begin + tensor.storage_offset() * tensor.element_size(), begin + end, writes);
}

void trace(const char* kind, std::string actor, std::string id, std::vector<Access> accesses, std::string name) {
  if (!tracing || !Py_IsInitialized()) return;
  auto where = where_now();
  std::lock_guard guard(entries_lock);
  entries.emplace_back(gettid(), kind, std::move(actor), std::move(id), std::move(accesses), std::move(name), std::move(where));
}

void define_trace(pybind11::module& module) {
  // A trace is kept from here on, with places in the package that is in this folder.
  module.def("start_trace", [](std::string folder) {
    package = std::move(folder);
    observer = at::addGlobalCallback(at::RecordFunctionCallback(&on_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
    tracing = true;
  });
  // Ends it, and returns its entries: thread, kind, actor ("" for the thread), id, accesses (begin, end, whether it writes), name,
  // where.
  module.def("end_trace", [] {
    tracing = false;
    if (observer) at::removeCallback(*observer);
    observer.reset();
    std::lock_guard guard(entries_lock);
    return std::exchange(entries, {});
  });
  // Adds what no operator tells: what a thread does to memory, or tells another one.
  module.def("note", [](const char* kind, std::string id, uint64_t begin, uint64_t nbytes, bool writes) {
    std::vector<Access> accesses;
    if (nbytes) accesses.emplace_back(begin, begin + nbytes, writes);
    trace(kind, "", std::move(id), std::move(accesses));
  }, pybind11::arg("kind"), pybind11::arg("id") = "", pybind11::arg("begin") = 0, pybind11::arg("nbytes") = 0, pybind11::arg("writes") = false);
}

} // namespace standin

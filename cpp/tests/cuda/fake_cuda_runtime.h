// The part of the CUDA runtime that cpp/cuda/toolkit calls, on host memory and with two devices
// that compute nothing. It has the runtime's state per thread and per device, so that tests check
// it without a GPU. It is compiled with the toolkit's headers, not with its library.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace fake {

struct Thread {
  int device = 0;  // default of the runtime
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
};
inline Thread& thread() {
  static thread_local Thread state;
  return state;
}

struct Launch {
  int device;
  bool overlap;
};

struct Machine {
  std::mutex mutex;
  std::set<int> contexts;            // devices that were started
  std::map<const void*, int> owner;  // live objects and their device
  std::vector<std::string> wrong;
  cudaError_t failing = cudaSuccess;  // what every call returns
  bool elsewhere_capturing = false;   // another library, in another thread, in global mode
  std::vector<Launch> launches;
  int attributes = 0;                     // attributes set on kernels
  bool peers = true;                      // devices can access each other
  std::set<std::pair<int, int>> enabled;  // device, and the one that it has access to
};
inline Machine machine;

// Starts a context on the thread's device, as calls that need one do.
inline cudaError_t enter() {
  const std::lock_guard lock(machine.mutex);
  if (machine.failing == cudaSuccess) machine.contexts.insert(thread().device);
  return machine.failing;
}

// Breaks a capture that forbids waiting, as calls that may wait do.
inline cudaError_t enter_waiting() {
  if (const cudaError_t error = enter()) return error;
  const bool forbidden =
      machine.elsewhere_capturing && thread().mode == cudaStreamCaptureModeGlobal;
  return forbidden ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

template <typename T>
cudaError_t make(T* out, size_t bytes = 1) {
  if (const cudaError_t error = enter_waiting()) return error;
  void* const object = std::malloc(bytes);
  const std::lock_guard lock(machine.mutex);
  machine.owner[object] = thread().device;
  *out = static_cast<T>(object);
  return cudaSuccess;
}

template <typename T>
cudaError_t end(T object, const char* what) {
  if (const cudaError_t error = enter_waiting()) return error;
  const std::lock_guard lock(machine.mutex);
  const auto found = machine.owner.find(object);
  if (found == machine.owner.end())
    machine.wrong.push_back(std::string(what) + ": not there");
  else if (found->second != thread().device)
    machine.wrong.push_back(std::string(what) + ": of another device");
  else
    machine.owner.erase(found);
  std::free(object);
  return cudaSuccess;
}

}  // namespace fake

extern "C" {
// NOLINTBEGIN
cudaError_t cudaGetLastError() {
  return fake::machine.failing;
}
const char* cudaGetErrorName(cudaError_t e) {
  return e == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress" : "another error";
}
const char* cudaGetErrorString(cudaError_t) {
  return "a text";
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 2;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  std::memset(p, 0, sizeof *p);
  std::strcpy(p->name, "a fake");
  p->major = 9;
  p->totalGlobalMem = 1000;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1000;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = fake::thread().device;
  return fake::machine.failing;
}
cudaError_t cudaSetDevice(int device) {
  fake::thread().device = device;
  return fake::enter();
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = fake::machine.peers;
  return fake::machine.failing;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  const bool again = !fake::machine.enabled.insert({fake::thread().device, peer}).second;
  return again ? cudaErrorPeerAccessAlreadyEnabled : fake::enter();
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, fake::thread().mode);
  return fake::machine.failing;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = 700, *total = 1000;
  return fake::enter();
}
cudaError_t cudaMalloc(void** p, size_t bytes) {
  return bytes > 700 ? cudaErrorMemoryAllocation : fake::make(p, bytes);
}
cudaError_t cudaFree(void* p) {
  return fake::end(p, "cudaFree");
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  return fake::make(p, bytes);
}
cudaError_t cudaFreeHost(void* p) {
  return fake::end(p, "cudaFreeHost");
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  std::memcpy(to, from, bytes);
  return fake::enter();
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return fake::enter();
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
  return fake::make(reinterpret_cast<void**>(s));
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return fake::enter_waiting();
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
  return fake::end(static_cast<void*>(s), "cudaStreamDestroy");
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return fake::enter();
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  return fake::make(reinterpret_cast<void**>(e));
}
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  return fake::end(static_cast<void*>(e), "cudaEventDestroy");
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  return fake::enter();
}
cudaError_t cudaEventQuery(cudaEvent_t) {
  return fake::enter_waiting();
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  return fake::enter_waiting();
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1;
  return fake::enter();
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode mode) {
  if (mode != cudaStreamCaptureModeThreadLocal)
    fake::machine.wrong.push_back("a capture that forbids others to allocate");
  return fake::enter();
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* g) {
  return fake::make(reinterpret_cast<void**>(g));
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t, unsigned long long) {
  return fake::make(reinterpret_cast<void**>(e));
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) {
  return fake::end(static_cast<void*>(g), "cudaGraphDestroy");
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
  return fake::enter();
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  return fake::enter();
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) {
  return fake::end(static_cast<void*>(e), "cudaGraphExecDestroy");
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  ++fake::machine.attributes;
  return fake::enter();
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  fake::machine.launches.push_back({fake::thread().device, config->numAttrs > 0});
  return fake::enter();
}
// NOLINTEND
}

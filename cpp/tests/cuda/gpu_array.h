// A vector in device memory, for drivers, with blocking copies to and from the host.
#pragma once

#include <cstring>
#include <vector>

#include "cuda/gpu.h"

namespace turbomind {

template <typename T>
class GpuArray {
 public:
  // Room for `size` elements, every byte 0xff: NaN in any float type.
  GpuArray(Gpu& gpu, size_t size) : size_(size), buffer_(gpu, size * sizeof(T)) {
    const GpuStream stream(gpu);
    gpu.fill(stream.handle(), buffer_.data(), 0xff, size * sizeof(T));
    stream.synchronize();
  }
  GpuArray(Gpu& gpu, const std::vector<T>& values) : GpuArray(gpu, values.size()) { set(values); }

  T* data() const { return buffer_.template as<T>(); }
  void set(const std::vector<T>& values) {
    Gpu& gpu = buffer_.gpu();
    const GpuStream stream(gpu);
    gpu.copy(stream.handle(), buffer_.data(), values.data(), size_ * sizeof(T));
    stream.synchronize();
  }
  std::vector<T> get() const {
    std::vector<T> values(size_);
    Gpu& gpu = buffer_.gpu();
    const GpuStream stream(gpu);
    gpu.copy(stream.handle(), values.data(), buffer_.data(), size_ * sizeof(T));
    stream.synchronize();
    return values;
  }

 private:
  size_t size_;
  DeviceBuffer buffer_;
};

}  // namespace turbomind

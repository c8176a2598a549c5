// Pages in device memory, in the order that pages are stored in. They are copied to and from the
// host on streams of their own, beside the steps, which never wait for them.
#pragma once

#include <memory>

#include "model/device/step_device.h"

namespace turbomind {

// `gpu` stays alive.
std::unique_ptr<DecoderPages> make_device_pages(GpuContext& gpu, const CachePlan& plan);

}  // namespace turbomind

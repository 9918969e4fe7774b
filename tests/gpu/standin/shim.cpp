// What a CPU build of torch lacks to accept the device "cuda": a guard whose streams and events do nothing (the CPU
// computes at once, in order), and hooks that count one GPU.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

namespace c10::impl {

struct StandInGuard final : DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Device getDevice() const override { return {DeviceType::CUDA, 0}; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  void synchronizeDevice(const DeviceIndex) const override {}

  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}

  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, StandInGuard)

}  // namespace c10::impl

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
};

static_assert(sizeof(CUDAHooks) == sizeof(CUDAHooksInterface));

// Torch asks for hooks once, when it is imported, and keeps those that say that there is no GPU: these take their place,
// so that torch may have been imported before.
[[maybe_unused]] const CUDAHooksInterface* const replaced =
    new (const_cast<CUDAHooksInterface*>(&detail::getCUDAHooks())) CUDAHooks;

}  // namespace at

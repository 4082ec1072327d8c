#pragma once
// Where tensors live.
#include <cstdint>
#include <string>
#include <vector>

#include "halftone/core/error.h"

namespace halftone {

enum class DeviceType : uint8_t { cpu, cuda };
inline constexpr int num_device_types = 2;

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  static constexpr Device cpu() { return {}; }
  static constexpr Device cuda(int index = 0) { return {DeviceType::cuda, index}; }
  constexpr bool operator==(const Device&) const = default;
};

HT_API std::string str(Device d);           // "cpu", "cuda:0"
HT_API Device device(std::string_view text);  // the inverse; also "cuda". Throws on an unknown device
// All devices of a type that this process can use; {} when there is none.
HT_API std::vector<Device> devices(DeviceType type);

}  // namespace halftone

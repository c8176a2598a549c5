// Binds formats of codes, and the sources of codes that DecoderBuilder packs.
#include <array>
#include <optional>
#include <tuple>

#include "bindings/bindings.h"
#include "bindings/buffer_view.h"
#include "linear/code_format.h"
#include "linear/codes/block_codes.h"
#include "linear/codes/packed_codes.h"

namespace turbomind::bindings {
namespace {

constexpr std::array<const char*, 4> kScaleNames = {"float32", "float16", "bfloat16", "int8"};
constexpr std::array<const char*, 3> kOffsetNames = {"none", "zero", "minimum"};
constexpr std::array<const char*, 5> kPackingNames = {"bytes", "inputs", "inputs_first", "outputs",
                                                      "outputs_last"};

// ---- formats

std::string code_format_name(int bits, int group, const std::string& scales,
                             const std::string& offsets, bool ordered) {
  CodeLayout layout;
  layout.bits = bits;
  layout.row_scales = group == 0;
  if (group != 0) layout.group = group;
  layout.scales = to_choice<ScaleType>("scales", scales, kScaleNames);
  layout.offsets = to_choice<Offsets>("offsets", offsets, kOffsetNames);
  layout.ordered = ordered;
  return code_format(layout).name();
}

std::string parts_format_name(const std::vector<std::pair<int64_t, std::string>>& parts) {
  FormatParts formats;
  for (const auto& [rows, name] : parts) formats.push_back({rows, &weight_format(name)});
  return parts_format(formats).name();
}

// Returns (bits, group, scales, offsets) of the format of each type of GGUF blocks.
std::vector<std::pair<std::string, std::tuple<int, int, std::string, std::string>>>
block_formats() {
  std::vector<std::pair<std::string, std::tuple<int, int, std::string, std::string>>> formats;
  for (const BlockType& type : block_types()) {
    const CodeLayout& l = type.layout;
    formats.push_back({type.name,
                       {l.bits, l.group, kScaleNames[static_cast<int>(l.scales)],
                        kOffsetNames[static_cast<int>(l.offsets)]}});
  }
  return formats;
}

void bind_formats(py::module_& m) {
  m.def("code_format", &code_format_name, py::arg("bits"), py::arg("group"), py::arg("scales"),
        py::arg("offsets") = "none", py::arg("ordered") = false,
        "Returns the name of a format of codes. Raises InvalidRequest for one that there is not.");
  m.def("parts_format", &parts_format_name, py::arg("parts"),
        "Returns the name of a format whose rows are of several: (rows, name) each.");
  m.def("block_formats", &block_formats,
        "Returns the name of each type of GGUF blocks and (bits, group, scales, offsets) of its "
        "format.");
}

// ---- sources

void check_size(const char* name, int64_t rows, int64_t cols) {
  constexpr int64_t kMost = int64_t{1} << 28;
  if (rows < 1 || rows > kMost || cols < 1 || cols > kMost)
    throw_error(ErrorCode::model, name, ": got ", rows, " rows and ", cols,
                " columns, expected 1 to ", kMost);
}

std::shared_ptr<CodeSource> make_packed_codes(int64_t rows, int64_t cols, int bits, int64_t group,
                                              const PackedIntegers& codes,
                                              const PackedScales& scales,
                                              const std::optional<PackedIntegers>& zeros,
                                              const py::object& columns) {
  check_size("PackedCodes", rows, cols);
  if (group < 0) throw_error(ErrorCode::model, "PackedCodes: got group ", group);
  auto source = std::make_shared<InBuffers<PackedCodes>>(rows, cols, bits, group, codes, scales,
                                                         zeros, ByteSpan{});
  source->columns = source->keep(columns, "PackedCodes: columns");
  return source;
}

void bind_packed(py::module_& m) {
  py::class_<PackedIntegers>(m, "PackedIntegers",
                             "A tensor of integers of 4 or 8 bits in words of 32.")
      .def(py::init([](std::string tensor, const SourceFile& file, const std::string& packing,
                       bool interleaved, uint32_t add) {
             return PackedIntegers{std::move(tensor), file,
                                   to_choice<Packing>("packing", packing, kPackingNames),
                                   interleaved, add};
           }),
           py::arg("tensor"), py::arg("file"), py::arg("packing"), py::arg("interleaved") = false,
           py::arg("add") = 0);
  py::class_<PackedScales>(m, "PackedScales", "A tensor of scales of groups.")
      .def(py::init([](std::string tensor, const SourceFile& file, const std::string& dtype,
                       bool groups_first) {
             return PackedScales{std::move(tensor), file,
                                 to_choice<ScaleType>("dtype", dtype, kScaleNames), groups_first};
           }),
           py::arg("tensor"), py::arg("file"), py::arg("dtype"), py::arg("groups_first") = false);
}

}  // namespace

void bind_codes(py::module_& m) {
  bind_formats(m);
  py::class_<SourceFile>(m, "SourceFile", "A row-major tensor in an open file.")
      .def(py::init([](std::string path, int descriptor, int64_t offset, int64_t bytes) {
             if (descriptor < 0 || offset < 0 || bytes < 0)
               throw_error(ErrorCode::invalid_request, "SourceFile: got descriptor ", descriptor,
                           ", offset ", offset, ", ", bytes, " bytes, expected none below 0");
             return SourceFile{std::move(path), descriptor, offset, bytes};
           }),
           py::arg("path"), py::arg("descriptor"), py::arg("offset"), py::arg("bytes"));
  bind_packed(m);
  py::class_<CodeSource, std::shared_ptr<CodeSource>>(m, "CodeSource",
                                                      "Rows of codes of a quantized checkpoint.");
  m.def(
      "block_codes",
      [](const std::string& tensor, const std::string& type, const SourceFile& file, int64_t rows,
         int64_t cols) -> std::shared_ptr<CodeSource> {
        check_size("BlockCodes", rows, cols);
        return std::make_shared<BlockCodes>(tensor, type, file, rows, cols);
      },
      py::arg("tensor"), py::arg("type"), py::arg("file"), py::arg("rows"), py::arg("cols"),
      "Returns the rows of a tensor of GGUF blocks.");
  m.def("packed_codes", &make_packed_codes, py::arg("rows"), py::arg("cols"), py::arg("bits"),
        py::arg("group"), py::arg("codes"), py::arg("scales"), py::arg("zeros") = py::none(),
        py::arg("columns") = py::none(),
        "Returns codes, scales and zero points that are in tensors of their own.");
}

}  // namespace turbomind::bindings

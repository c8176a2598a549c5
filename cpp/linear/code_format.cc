#include "linear/code_format.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>

#include "core/error.h"
#include "cpu/isa_dispatch.h"
#include "linear/code_rows.h"
#include "linear/coded_row.h"
#include "linear/product.h"
#include "linear/row_source.h"

namespace turbomind {

TM_KERNEL_TABLE(CodeKernels, code_kernel_table)

const CodeKernels& code_kernels(Isa isa) {
  return code_kernel_table(isa);
}

namespace {

// ---- names: int8, int4-g128-bfloat16-minimum, 64 int8 + 32 bfloat16

constexpr const char* kScaleNames[] = {"float32", "float16", "bfloat16", "factor"};
constexpr const char* kOffsetNames[] = {"", "zero", "minimum"};

std::string name_of(const CodeLayout& l) {
  std::string name = "int" + std::to_string(l.bits);
  if (!l.row_scales)
    name += "-g" + std::to_string(l.group) + "-" + kScaleNames[static_cast<int>(l.scales)];
  if (l.offsets != Offsets::none)
    name += std::string("-") + kOffsetNames[static_cast<int>(l.offsets)];
  return name + (l.ordered ? "-ordered" : "");
}

std::vector<std::string> split(const std::string& text, const std::string& by) {
  std::vector<std::string> words;
  size_t begin = 0, end;
  while ((end = text.find(by, begin)) != std::string::npos) {
    words.push_back(text.substr(begin, end - begin));
    begin = end + by.size();
  }
  words.push_back(text.substr(begin));
  return words;
}

// The number that `text` consists of; 0 for anything else.
int64_t number(const std::string& text) {
  const bool digits = !text.empty() && text.size() < 10 &&
                      text.find_first_not_of("0123456789") == std::string::npos;
  return digits ? std::stoll(text) : 0;
}

// Reads what name_of() writes. Returns false for another name.
bool read_layout(const std::string& name, CodeLayout& l) {
  const std::vector<std::string> words = split(name, "-");
  l.row_scales = true;
  l.bits = words[0] == "int4" ? 4 : 8;
  for (size_t i = 1; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word[0] == 'g') {
      l.group = static_cast<int>(number(word.substr(1)));
      l.row_scales = false;
    }
    for (int s = 0; s < 4; ++s)
      if (word == kScaleNames[s]) l.scales = static_cast<ScaleType>(s);
    for (int o = 1; o < 3; ++o)
      if (word == kOffsetNames[o]) l.offsets = static_cast<Offsets>(o);
    l.ordered |= word == "ordered";
  }
  return name_of(l) == name;
}

// The formats of this process, by name.
class Formats {
 public:
  const WeightFormat* find(const std::string& name) {
    std::lock_guard lock(mutex_);
    const auto it = formats_.find(name);
    return it == formats_.end() ? nullptr : it->second.get();
  }
  const WeightFormat& add(std::unique_ptr<WeightFormat> format) {
    std::lock_guard lock(mutex_);
    const std::string name = format->name();
    return *formats_.emplace(name, std::move(format)).first->second;  // or the one that is there
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<WeightFormat>> formats_;
};

Formats& formats() {
  static Formats all;
  return all;
}

void check_layout(const CodeLayout& l) {
  const auto refuse = [&](const char* what, int64_t value, const char* expected) {
    throw_error(ErrorCode::invalid_request, "a format of codes has ", what, " ", value,
                ", expected ", expected);
  };
  if (l.bits != 4 && l.bits != 8) refuse("bits", l.bits, "4 or 8");
  const bool power = l.group >= 16 && l.group <= 256 && (l.group & (l.group - 1)) == 0;
  if (!power) refuse("group", l.group, "0, 16, 32, 64, 128 or 256");
  if (l.row_scales && (l.scales != ScaleType::f32 || l.offsets != Offsets::none))
    refuse("group", 0, "a group of 16 to 256 for offsets or scales other than float32");
  if (l.scales == ScaleType::factor && (l.offsets == Offsets::zero || l.group > 128))
    refuse("group", l.group, "16 to 128 and no zeros for scales of int8");
}

// ---- rows

// The rows of a matrix that come as codes; others have null.
struct RowOfCodes {
  const CodeRows* rows = nullptr;
  int64_t row = 0;
  int64_t first_col = 0;
};

std::vector<RowOfCodes> rows_of_codes(const std::vector<RowSegment>& segments) {
  std::vector<RowOfCodes> all;
  for (const RowSegment& s : segments)
    for (int64_t r = s.row_begin; r < s.row_begin + s.rows; ++r)
      all.push_back({s.codes, r, s.col_begin});
  return all;
}

bool is_zero(const RowSegment& s) {
  return s.data == nullptr && s.file == nullptr && s.codes == nullptr;
}

}  // namespace

// ---- codes

CodeFormat::CodeFormat(const CodeLayout& layout) : layout_(layout), name_(name_of(layout)) {}

int64_t CodeFormat::column_step() const {
  if (layout_.ordered) return 0;  // groups are of columns in their own order
  if (layout_.scales == ScaleType::factor) return kSuperBlock;
  return layout_.row_scales ? 1 : layout_.group;
}

size_t CodeFormat::packed_bytes(int64_t n, int64_t k) const {
  if (n == 0) return 0;  // where the first row begins
  const int64_t panels = round_up(n, kPanel) / kPanel;
  return static_cast<size_t>(panels * layout_.panel_bytes(k) +
                             (layout_.ordered ? round_up(k * 4, 64) : 0));
}

const int32_t* CodeFormat::columns(const LinearWeight& w) const {
  if (!layout_.ordered) return nullptr;
  const int64_t panels = round_up(w.n, kPanel) / kPanel;
  return reinterpret_cast<const int32_t*>(w.data + panels * layout_.panel_bytes(w.k));
}

void CodeFormat::check(const std::vector<RowSegment>& segments, int64_t) const {
  const CodeRows* first = nullptr;
  for (const RowSegment& s : segments) {
    if (is_zero(s)) continue;
    if (s.codes == nullptr) {
      if (!can_quantize(layout_))
        throw_error(ErrorCode::model, "the source has ", dtype_name(s.dtype),
                    " values, expected codes of ", name_);
      continue;
    }
    if (s.cols != s.codes->cols && (column_step() == 0 || s.col_begin % column_step() != 0))
      throw_error(ErrorCode::internal, "columns of ", name_, " are cut at ", s.col_begin,
                  ", expected a multiple of ", column_step());
    if (s.codes == first) continue;
    check_code_rows(*s.codes, layout_);
    if (first != nullptr && layout_.ordered &&
        std::memcmp(first->columns.data, s.codes->columns.data, first->columns.bytes) != 0)
      throw_error(ErrorCode::model, "columns differ between its sources, expected equal ones");
    first = s.codes;
  }
}

void CodeFormat::pack(ThreadPool& pool, const std::vector<RowSegment>& segments, int64_t n,
                      int64_t k, uint8_t* dst) const {
  const SourceRows dense(segments, n, k);
  const std::vector<RowOfCodes> coded = rows_of_codes(segments);
  const int64_t panels = round_up(n, kPanel) / kPanel, panel_bytes = layout_.panel_bytes(k);
  pool.parallel_for(panels, 4, [&](int64_t begin, int64_t end, int) {
    std::vector<float> values(padded_cols(k));
    CodedRow row(layout_, k);
    for (int64_t r = begin * kPanel; r < end * kPanel; ++r) {
      uint8_t* panel = dst + r / kPanel * panel_bytes;
      if (r % kPanel == 0) std::memset(panel, 0, panel_bytes);
      if (r < n && coded[r].rows != nullptr) {
        row.take(*coded[r].rows, coded[r].row, coded[r].first_col);
      } else if (r < n && dense.row(r) != nullptr) {
        dense.convert(r, DType::f32, reinterpret_cast<uint8_t*>(values.data()));
        row.quantize(values.data());
      } else {
        row.clear();
      }
      row.write(panel, r % kPanel);
    }
  });
  if (!layout_.ordered) return;
  const auto source = std::find_if(coded.begin(), coded.end(),
                                   [](const RowOfCodes& r) { return r.rows != nullptr; });
  if (source == coded.end()) throw_error(ErrorCode::internal, "pack: no source has columns");
  std::memcpy(dst + panels * panel_bytes, source->rows->columns.data, k * 4);
}

void CodeFormat::unpack_row(const LinearWeight& w, int64_t row, float* out) const {
  const uint8_t* panel = w.data + row / kPanel * layout_.panel_bytes(w.k);
  if (!layout_.ordered) return CodedRow::read(layout_, w.k, panel, row % kPanel, out);
  std::vector<float> values(w.k);
  CodedRow::read(layout_, w.k, panel, row % kPanel, values.data());
  for (int64_t i = 0; i < w.k; ++i) out[columns(w)[i]] = values[i];
}

void CodeFormat::matmul(Context& ctx, const LinearWeight& w, const Mat& x, const Mat& y,
                        const LinearArgs& args) const {
  if (x.rows == 0) return;
  const LinearKernel kernel = this->kernel(ctx.isa);
  const Product product{&kernel, job(w), &w, x, y, args};
  run_products(ctx, {&product, 1});
}

void CodeFormat::matmul_group(Context& ctx, const WeightGroup& w, const int32_t* begin, int64_t,
                              const Mat& x, const Mat& y, Epilogue epilogue) const {
  const LinearKernel kernel = this->kernel(ctx.isa);
  std::vector<Product>& products = group_products(w, begin, x, y, epilogue);
  for (Product& p : products) p.kernel = &kernel, p.job = job(*p.w);
  run_products(ctx, products);
}

LinearKernel CodeFormat::kernel(Isa isa) const {
  const CodeKernels& kernels = code_kernels(isa);
  LinearKernel kernel = layout_.bits == 4 ? *kernels.four : *kernels.eight;
  kernel.chunk_k_blocks = static_cast<int>(kernel.chunk_k_blocks * 128 / layout_.k_block());
  if (layout_.bits == 4) kernel.unpacked_bytes = layout_.k_block() * kPanel;
  return kernel;
}

LinearJob CodeFormat::job(const LinearWeight& w) const {
  LinearJob job;
  job.codes = layout_;
  job.columns = columns(w);
  job.panel_bytes = layout_.panel_bytes(w.k);
  job.k_block_bytes = layout_.block_bytes();
  job.k_blocks = layout_.k_blocks(w.k);
  return job;
}

const WeightFormat& code_format(const CodeLayout& layout) {
  check_layout(layout);
  if (const WeightFormat* format = formats().find(name_of(layout))) return *format;
  return formats().add(std::make_unique<CodeFormat>(layout));
}

const WeightFormat& int8_format() {
  CodeLayout layout;
  layout.row_scales = true;
  return code_format(layout);
}

// ---- parts

namespace {

class PartsFormat final : public WeightFormat {
 public:
  explicit PartsFormat(const FormatParts& parts) : parts_(parts) {
    for (const auto& [rows, format] : parts_)
      name_ += (name_.empty() ? "" : " + ") + std::to_string(rows) + " " + format->name();
  }

  const char* name() const override { return name_.c_str(); }
  DType source_dtype() const override { return DType::f32; }
  DType activation_dtype(Isa isa) const override {
    const DType first = parts_.front().second->activation_dtype(isa);
    for (const auto& part : parts_)
      if (part.second->activation_dtype(isa) != first) return DType::f32;
    return first;
  }
  bool packs_pieces() const override { return false; }
  const WeightFormat& of_rows(const std::vector<RowRange>& ranges) const override {
    FormatParts found;
    for (const RowRange& range : ranges) {
      int64_t first = 0;
      for (const auto& [count, format] : parts_) {
        const int64_t lo = std::max(first, range.begin), hi = std::min(first + count, range.end);
        first += count;
        if (lo >= hi) continue;
        if (!found.empty() && found.back().second == format)
          found.back().first += hi - lo;
        else
          found.push_back({hi - lo, format});
      }
    }
    return found.size() == 1 ? *found[0].second : parts_format(found);
  }
  int64_t column_step() const override {
    int64_t step = 1;
    for (const auto& part : parts_)
      step = part.second->column_step() ? std::lcm(step, part.second->column_step()) : 0;
    return step;
  }
  size_t packed_bytes(int64_t n, int64_t k) const override {
    if (n == 0) return 0;  // where the first row begins
    size_t bytes = 0;
    int64_t rows = 0;
    for (const auto& [count, format] : parts_) {
      bytes += part_bytes(*format, count, k);
      rows += count;
    }
    if (rows != n) throw_error(ErrorCode::model, "the parts have ", rows, " rows, expected ", n);
    return bytes;
  }
  void check(const std::vector<RowSegment>& segments, int64_t k) const override {
    int64_t row = 0;
    for (const auto& [count, format] : parts_) {
      format->check(some_rows(segments, row, count), k);
      row += count;
    }
  }
  void pack(ThreadPool& pool, const std::vector<RowSegment>& segments, int64_t, int64_t k,
            uint8_t* dst) const override {
    int64_t row = 0;
    for (const auto& [count, format] : parts_) {
      format->pack(pool, some_rows(segments, row, count), count, k, dst);
      dst += part_bytes(*format, count, k);
      row += count;
    }
  }
  void unpack_row(const LinearWeight& w, int64_t row, float* out) const override {
    each_part(w, [&](const LinearWeight& part, int64_t first) {
      if (row >= first && row < first + part.n) part.format->unpack_row(part, row - first, out);
    });
  }
  void reserve(Context& ctx, const LinearWeight& w, int64_t rows) const override {
    each_part(w, [&](const LinearWeight& part, int64_t) { part.format->reserve(ctx, part, rows); });
  }
  void matmul(Context& ctx, const LinearWeight& w, const Mat& x, const Mat& y,
              const LinearArgs& args) const override {
    if (is_gated(args.epilogue))
      throw_error(ErrorCode::internal, "a weight of parts has gate and up rows");
    each_part(w, [&](const LinearWeight& part, int64_t first) {
      LinearArgs some = args;
      some.part = true;
      some.first_col = args.first_col + first;
      part.format->matmul(ctx, part, x, y, some);
    });
  }

 private:
  static size_t part_bytes(const WeightFormat& format, int64_t rows, int64_t k) {
    return static_cast<size_t>(round_up(static_cast<int64_t>(format.packed_bytes(rows, k)), 64));
  }
  template <typename F>
  void each_part(const LinearWeight& w, F&& f) const {
    int64_t first = 0;
    uint8_t* data = w.data;
    for (const auto& [rows, format] : parts_) {
      const size_t bytes = part_bytes(*format, rows, w.k);
      f(LinearWeight{format, rows, w.k, data, bytes}, first);
      first += rows;
      data += bytes;
    }
  }

  const FormatParts parts_;
  std::string name_;
};

}  // namespace

const WeightFormat& parts_format(const FormatParts& parts) {
  if (parts.empty()) throw_error(ErrorCode::invalid_request, "parts is empty, expected 1 or more");
  for (const auto& [rows, format] : parts) {
    if (rows < 1 || format == nullptr)
      throw_error(ErrorCode::invalid_request, "a part has ", rows, " rows, expected at least 1");
  }
  return formats().add(std::make_unique<PartsFormat>(parts));
}

const WeightFormat* named_code_format(const std::string& name) {
  if (const WeightFormat* format = formats().find(name)) return format;
  CodeLayout layout;
  if (read_layout(name, layout)) return &code_format(layout);
  FormatParts parts;
  for (const std::string& part : split(name, " + ")) {
    const size_t space = part.find(' ');
    if (space == std::string::npos) return nullptr;
    parts.push_back({number(part.substr(0, space)), &weight_format(part.substr(space + 1))});
  }
  return &parts_format(parts);
}

}  // namespace turbomind

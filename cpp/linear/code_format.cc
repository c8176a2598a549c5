#include "linear/code_format.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>

#include "core/error.h"
#include "cpu/isa_dispatch.h"
#include "linear/codes/code_panel.h"
#include "linear/codes/code_source.h"
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

bool is_zero(const RowSegment& s) {
  return s.data == nullptr && s.file == nullptr && s.codes == nullptr && s.make == nullptr;
}

// Fills panels of a matrix from the rows that segments stack up to.
class PanelFiller {
 public:
  PanelFiller(const CodeLayout& layout, const std::vector<RowSegment>& segments, int64_t n,
              int64_t k)
      : layout_(layout), segments_(segments), dense_(segments, n, k), n_(n), k_(k) {
    for (const RowSegment& s : segments) {
      ends_.push_back((ends_.empty() ? 0 : ends_.back()) + s.rows);
      if (s.codes != nullptr && s.codes->cols != k) whole_cols_ = s.codes->cols;
    }
  }
  // The memory of one worker.
  struct Work {
    std::optional<CodePanel> panel, whole;
    std::vector<float> values;
  };

  void fill(int64_t first, Work& work, uint8_t* out) const {
    if (!work.panel) {
      work.panel.emplace(layout_, k_);
      if (whole_cols_) work.whole.emplace(layout_, whole_cols_);
      work.values.resize(padded_cols(k_));
    }
    CodePanel& panel = *work.panel;
    int64_t first_col = 0;
    each_run(first, [&](const RowSegment& s, int64_t row, int64_t count) {
      if (s.codes == nullptr) return;
      static const CodePiece kInMemory;
      const int64_t begin = s.row_begin + row - (ends_[&s - segments_.data()] - s.rows);
      s.codes->decode(s.piece ? *s.piece : kInMemory, begin, count, row - first,
                      whole_cols_ ? *work.whole : panel);
      first_col = s.col_begin;
    });
    if (whole_cols_) panel.take(*work.whole, first_col);
    each_run(first, [&](const RowSegment& s, int64_t row, int64_t count) {
      for (int64_t r = row; s.codes == nullptr && r < row + count; ++r)
        fill_row(r, work.values, r - first, panel);
    });
    for (int64_t r = std::max(first, n_); r < first + kPanel; ++r) panel.clear(r - first);
    panel.check_finite();
    panel.write(out);
  }

 private:
  // Calls f(segment, row, count) for the rows of a panel that each segment has.
  template <typename F>
  void each_run(int64_t first, F&& f) const {
    const int64_t end = std::min(n_, first + kPanel);
    auto segment = std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin();
    for (int64_t row = first; row < end; row = std::min(end, ends_[segment++]))
      f(segments_[segment], row, std::min(end, ends_[segment]) - row);
  }
  void fill_row(int64_t row, std::vector<float>& values, int64_t at, CodePanel& panel) const {
    if (dense_.row(row) == nullptr) return panel.clear(at);
    dense_.convert(row, DType::f32, reinterpret_cast<uint8_t*>(values.data()));
    panel.quantize(at, values.data());
  }

  const CodeLayout& layout_;
  const std::vector<RowSegment>& segments_;
  const SourceRows dense_;
  const int64_t n_, k_;
  std::vector<int64_t> ends_;  // of the segments, in rows of the matrix
  int64_t whole_cols_ = 0;     // of the sources, where only some of their columns are packed
};

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
  const CodeSource* first = nullptr;
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
    s.codes->check(layout_);
    if (first != nullptr && layout_.ordered &&
        std::memcmp(first->columns.data, s.codes->columns.data, first->columns.bytes) != 0)
      throw_error(ErrorCode::model, "columns differ between its sources, expected equal ones");
    first = s.codes;
  }
}

void CodeFormat::pack(ThreadPool& pool, const std::vector<RowSegment>& segments, int64_t n,
                      int64_t k, uint8_t* dst) const {
  pack_rows(pool, segments, {0, n}, n, k, dst);
}

void CodeFormat::pack_rows(ThreadPool& pool, const std::vector<RowSegment>& segments,
                           const RowRange& rows, int64_t n, int64_t k, uint8_t* dst) const {
  const PanelFiller filler(layout_, segments, rows.size(), k);
  const int64_t panel_bytes = layout_.panel_bytes(k), first = rows.begin / kPanel;
  std::vector<PanelFiller::Work> work(pool.size());
  pool.parallel_for(round_up(rows.size(), kPanel) / kPanel, 1,
                    [&](int64_t begin, int64_t end, int worker) {
                      for (int64_t p = begin; p < end; ++p)
                        filler.fill(p * kPanel, work[worker], dst + (first + p) * panel_bytes);
                    });
  if (!layout_.ordered || rows.end != n) return;
  const auto source = std::find_if(segments.begin(), segments.end(),
                                   [](const RowSegment& s) { return s.codes != nullptr; });
  if (source == segments.end()) throw_error(ErrorCode::internal, "pack: no source has columns");
  std::memcpy(dst + round_up(n, kPanel) / kPanel * panel_bytes, source->codes->columns.data, k * 4);
}

void CodeFormat::unpack_row(const LinearWeight& w, int64_t row, float* out) const {
  const uint8_t* panel = w.data + row / kPanel * layout_.panel_bytes(w.k);
  if (!layout_.ordered) return CodePanel::read(layout_, w.k, panel, row % kPanel, out);
  std::vector<float> values(w.k);
  CodePanel::read(layout_, w.k, panel, row % kPanel, values.data());
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
  std::vector<RowRange> ranges(int64_t) const override {
    std::vector<RowRange> all;
    for (const auto& [count, format] : parts_) {
      const int64_t begin = all.empty() ? 0 : all.back().end;
      all.push_back({begin, begin + count});
    }
    return all;
  }
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
  void pack(ThreadPool& pool, const std::vector<RowSegment>& segments, int64_t n, int64_t k,
            uint8_t* dst) const override {
    for (const RowRange& rows : ranges(n))
      pack_rows(pool, some_rows(segments, rows.begin, rows.size()), rows, n, k, dst);
  }
  void pack_rows(ThreadPool& pool, const std::vector<RowSegment>& segments, const RowRange& rows,
                 int64_t, int64_t k, uint8_t* dst) const override {
    int64_t first = 0;
    for (const auto& [count, format] : parts_) {
      if (rows.begin < first + count)
        return format->pack_rows(pool, segments, {rows.begin - first, rows.end - first}, count, k,
                                 dst);
      first += count;
      dst += part_bytes(*format, count, k);
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

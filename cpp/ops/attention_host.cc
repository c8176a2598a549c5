#include "ops/attention_host.h"

#include <algorithm>
#include <cstring>

#include "cpu/isa_dispatch.h"
#include "ops/attention_kernels.h"

namespace turbomind {

TM_KERNEL_TABLE(AttentionKernels, attention_kernels)

namespace {

uint8_t* element(const Mat& m, int64_t row, int64_t col) {
  return static_cast<uint8_t*>(m.data) +
         static_cast<size_t>(row * m.stride + col) * dtype_bytes(m.dtype);
}

size_t partial_bytes(int workers, int v_width) {
  return static_cast<size_t>(AttentionTasks::most_partial_rows(workers)) *
         static_cast<size_t>(v_width + kPartialState) * sizeof(float);
}

void reserve(AttentionScratch& scratch, const AttentionKernels& kernels, const KvLayout& l,
             int workers) {
  const size_t floats = kernels.scratch_floats(l.k_width(), l.v_width());
  if (scratch.per_worker.size() < static_cast<size_t>(workers)) {
    scratch.per_worker.resize(workers);
    scratch.finished.reset(new std::atomic<int32_t>[AttentionTasks::most_split_blocks(workers)]);
  }
  for (auto& buffer : scratch.per_worker) {
    if (buffer.size() < floats) buffer.resize(floats);
  }
  const size_t partial = partial_bytes(workers, l.v_width());
  if (scratch.partials.size() >= partial) return;
  scratch.partials = {};
  scratch.partials = HugeBuffer(partial);
}

// One call of attention(): what all of its tasks share.
class HostAttention {
 public:
  HostAttention(const AttentionKernels& kernels, const AttentionShape& shape,
                const KvLayout& layout, const PageView& pages, const AttentionSeq* seqs,
                const Mat& q, const Mat& out, AttentionScratch& scratch)
      : kernels_(kernels),
        shape_(shape),
        layout_(layout),
        seqs_(seqs),
        q_(q),
        out_(out),
        scratch_(scratch) {
    common_.group = shape.heads / shape.kv_heads;
    common_.k_width = layout.k_width();
    common_.v_width = layout.v_width();
    common_.v_dim = shape.v_dim;
    common_.kv = layout.dtype;
    common_.bf16_out = out.dtype == DType::bf16;
    common_.scale = shape.scale;
    common_.softcap = shape.softcap;
    common_.window = shape.window;
    common_.q_stride = q.stride;
    common_.out_stride = out.stride;
    common_.base = pages.base;
    common_.page_bytes = pages.page_bytes;
    for (int64_t i = 0; i < scratch.tasks.split_blocks(); ++i) {
      scratch.finished[i].store(0, std::memory_order_relaxed);
    }
  }

  // The last of the tasks that share a block's keys merges their results.
  void run(const AttentionTask& task, int worker) const {
    const SeqTasks& t = *task.of;
    float* scratch = scratch_.per_worker[worker].data();
    AttentionBlock b = block_of(task);
    const UnitRange units = scratch_.tasks.units(seqs_[t.seq], t, task.block);
    if (units.first + task.unit > units.last) return;
    if (units.first == units.last) return kernels_.attend(b, scratch);
    const int64_t block = task.head * t.blocks + task.block;
    const int64_t unit_floats = int64_t{t.block_rows} * (b.v_width + kPartialState);
    float* partials = scratch_.partials.as<float>() + t.first_row * (b.v_width + kPartialState) +
                      block * t.units * unit_floats;
    b.key_begin = (units.first + task.unit) * t.unit_keys;
    b.key_end = b.key_begin + t.unit_keys;
    b.partial = partials + task.unit * unit_floats;
    kernels_.attend(b, scratch);
    const int64_t count = units.last - units.first + 1;
    std::atomic<int32_t>& finished = scratch_.finished[t.first_block + block];
    if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
    b.partial = partials;
    kernels_.merge(b, {units.first, t.unit_keys, unit_floats}, scratch);
  }

 private:
  AttentionBlock block_of(const AttentionTask& task) const {
    const AttentionSeq& s = seqs_[task.of->seq];
    AttentionBlock b = common_;
    const int64_t first_head = task.head * common_.group;
    const int head = static_cast<int>(task.head);
    b.sinks = shape_.sinks ? shape_.sinks + first_head : nullptr;
    b.q = element(q_, s.q_begin, first_head * common_.k_width);
    b.out = element(out_, s.q_begin, first_head * common_.v_dim);
    b.pages = s.pages;
    b.k_offset = layout_.k_offset(head);
    b.v_offset = layout_.v_offset(head);
    b.kv_begin = s.kv_begin;
    b.m_begin = task.block * task.of->block_rows;
    b.m_count = static_cast<int>(
        std::min<int64_t>(task.of->block_rows, s.q_len * common_.group - b.m_begin));
    b.key_begin = 0;
    b.key_end = s.kv_begin + s.q_len;
    b.partial = nullptr;
    return b;
  }

  const AttentionKernels& kernels_;
  const AttentionShape& shape_;
  const KvLayout& layout_;
  const AttentionSeq* seqs_;
  const Mat &q_, &out_;
  AttentionScratch& scratch_;
  AttentionBlock common_{};
};

void clear_padding(const SeqBatch& batch, const Mat& out) {
  const int64_t padded = std::min(padded_cols(out.cols), std::max(out.stride, out.cols));
  if (padded == out.cols) return;
  for (int64_t s = 0; s < batch.count; ++s) {
    for (int64_t i = 0; i < batch.seqs[s].q_len; ++i) {
      std::memset(element(out, batch.seqs[s].q_begin + i, out.cols), 0,
                  static_cast<size_t>(padded - out.cols) * dtype_bytes(out.dtype));
    }
  }
}

}  // namespace

size_t attention_scratch_bytes(Isa isa, int workers, int k_dim, int v_dim) {
  KvLayout l;
  l.k_dim = k_dim;
  l.v_dim = v_dim;
  const size_t floats = attention_kernels(isa).scratch_floats(l.k_width(), l.v_width());
  return static_cast<size_t>(workers) * floats * sizeof(float) +
         partial_bytes(workers, l.v_width());
}

void attention_on_host(Context& ctx, const AttentionShape& shape, const KvLayout& layout,
                       const PageView& pages, const SeqBatch& batch, const Mat& q, const Mat& out,
                       AttentionScratch& scratch) {
  const AttentionKernels& kernels = attention_kernels(ctx.isa);
  const int workers = ctx.pool.size();
  reserve(scratch, kernels, layout, workers);
  scratch.tasks.plan({shape.heads / shape.kv_heads, shape.kv_heads, shape.window, kernels.step_rows,
                      kernels.most_rows, workers},
                     batch.seqs, batch.count);
  const HostAttention work(kernels, shape, layout, pages, batch.seqs, q, out, scratch);
  ctx.pool.parallel_for(scratch.tasks.size(), 1, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t i = begin; i < end; ++i) work.run(scratch.tasks.task(i), worker);
  });
  clear_padding(batch, out);
}

}  // namespace turbomind

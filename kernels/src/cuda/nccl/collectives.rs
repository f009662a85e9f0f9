//! Collectives through NCCL.

use bursar_budgets::Bytes;
use cudarc::driver::sys::CUstream;

use super::{
    super::{
        contract::all_reduce::UNIT,
        copy_link::{ByteRows, bytes, copy_rows},
        elementwise,
        lane::Cuda,
    },
    library::{Calls, number, number_of},
    link::{NcclLink, ROWS_MAX, data_at},
};
use crate::{DType, KernelError, Tensor, calls};

impl NcclLink {
    pub(in super::super) fn all_reduce(&self, cuda: &Cuda, call: calls::AllReduce<'_>) -> Result<(), KernelError> {
        cuda.enter()?;
        let (dtype, columns) = (call.partial.dtype(), call.partial.columns());
        let width = bytes(dtype, columns);
        let at_once = (self.half / width.max(1)).min(ROWS_MAX);
        if at_once == 0 {
            return Err(KernelError::NoKernel { op: "all_reduce" });
        }
        let rows = call.partial.rows();
        for first in (0..rows).step_by(at_once) {
            let some = first..rows.min(first + at_once);
            let (count, data) = (some.len(), data_at(self.memory));
            let (partial, out) = (call.partial.row_range(some.clone()), call.out.row_range(some));
            let sums = ByteRows { start: data, pitch: width };
            copy_rows(&cuda.stream, ByteRows::of(&partial), sums, [count, width])?;
            self.launch(cuda, "ncclAllReduce", |calls, communicator, stream| {
                let (elements, kind) = (count * columns, number_of(dtype));
                // SAFETY: the `count` rows at `data` were written by the preceding copy, and the
                // communicator and the stream are alive.
                unsafe { (calls.all_reduce)(data.0, data.0, elements, kind, number::SUM, communicator, stream) }
            })?;
            if call.accumulate {
                self.add(cuda, &out)?;
            } else {
                copy_rows(&cuda.stream, sums, ByteRows::of(&out), [count, width])?;
            }
        }
        Ok(())
    }

    /// Adds the sums in exchange memory to the rows of `out`.
    fn add(&self, cuda: &Cuda, out: &Tensor<'_>) -> Result<(), KernelError> {
        // SAFETY: the creator of the link guarantees that its memory is valid. Earlier work of the
        // stream has written the sums, and the row indices were written when the link was created.
        let (sums, rows) = unsafe {
            let sums = Tensor::persistent(data_at(self.memory), [out.rows(), out.columns()], out.dtype());
            (sums, Tensor::persistent(self.memory, [out.rows()], DType::U32))
        };
        elementwise::add_rows(cuda, calls::AddRows { x: sums, from: rows.view(), to: rows.view(), out: out.view() })
    }

    pub(in super::super) fn all_gather(&self, cuda: &Cuda, call: calls::AllGather<'_>) -> Result<(), KernelError> {
        cuda.enter()?;
        let (rows, ranks, data) = (call.part.rows(), self.rank.of(), data_at(self.memory));
        let width = bytes(call.part.dtype(), call.part.columns());
        // Both halves together receive the parts of all ranks. A row that is too wide for this
        // is gathered in pieces.
        let [rows_at_once, piece] = gathered_at_once(2 * self.half, ranks, width);
        if piece == 0 && width > 0 {
            return Err(KernelError::NoKernel { op: "all_gather" });
        }
        for column in (0..width).step_by(piece.max(1)) {
            let wide = piece.min(width - column);
            for first in (0..rows).step_by(rows_at_once) {
                let count = rows_at_once.min(rows - first);
                let sent = count * wide;
                let of_rank = |rank: usize| ByteRows { start: data.offset(Bytes((rank * sent) as u64)), pitch: wide };
                let (own, size) = (of_rank(self.rank.index()), [count, wide]);
                copy_rows(&cuda.stream, ByteRows::of(&call.part).at_row(first).at_byte(column), own, size)?;
                self.launch(cuda, "ncclAllGather", |calls, communicator, stream| {
                    // SAFETY: this rank's part was written by the preceding copy, and there is
                    // space at `data` for the parts of all ranks.
                    unsafe { (calls.all_gather)(own.start.0, data.0, sent, number::UINT8, communicator, stream) }
                })?;
                for rank in 0..ranks {
                    let to = ByteRows::of(&call.out).at_row(first).at_byte(rank * width + column);
                    copy_rows(&cuda.stream, of_rank(rank), to, size)?;
                }
            }
        }
        Ok(())
    }

    fn launch(
        &self,
        cuda: &Cuda,
        call: &'static str,
        run: impl FnOnce(&Calls, *mut std::ffi::c_void, CUstream) -> i32,
    ) -> Result<(), KernelError> {
        let is_captured = cuda.captures.get();
        self.watch.launch(u64::from(!is_captured), || {
            let launched = run(&self.calls, self.communicator.0, cuda.stream.raw());
            Ok::<_, KernelError>(self.calls.check(call, launched, Some(cuda.kernels.device.as_ref()))?)
        })?;
        self.captured.set(self.captured.get() + u64::from(is_captured));
        Ok(())
    }
}

/// Returns how many rows, and how many bytes of each row, are gathered at once into `scratch`
/// bytes. Each of `ranks` ranks contributes rows of `width` bytes.
fn gathered_at_once(scratch: usize, ranks: usize, width: usize) -> [usize; 2] {
    let of_rank = scratch / ranks / UNIT * UNIT;
    let piece = width.min(of_rank);
    [(of_rank / piece.max(1)).max(1), piece]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gathered_pieces_of_all_ranks_fit_the_scratch_buffer() {
        for (scratch, ranks, width) in [(64 << 10, 2, 76_032 * 4), (1 << 20, 8, 304), (4096, 3, 4096), (96, 3, 30)] {
            let [rows, piece] = gathered_at_once(scratch, ranks, width);
            assert!(
                piece > 0 && rows > 0 && rows * piece * ranks <= scratch,
                "{rows} rows of {piece} do not fit {scratch}"
            );
            assert!(rows == 1 || piece == width, "a row that is split is sent on its own");
        }
    }
}

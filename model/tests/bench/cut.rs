//! Patches that the CPU operation cuts, in the reference's order: merge groups row by row.

use bursar_budgets::{Bytes, Class, Workspace};
use bursar_kernels::{
    Cpu, KernelError, Scope, WorkCounter,
    ops::patchify::{PatchSize, Pixels},
};
use bursar_model::{
    flow::{ResizedImage, RgbImage},
    processor::ImageProcessorConfig,
};

use super::Memory;

/// `[patches, values]`, flattened: merge groups row by row, and within each group its
/// patches row by row.
pub fn cut(patches: &ResizedImage, config: &ImageProcessorConfig) -> Vec<f32> {
    let size = PatchSize { side: config.patch_size as usize, frames: config.temporal_patch_size as usize };
    let values = patches.grid.patches() * size.values();
    let memory = Memory::new(Bytes::mib(64));
    // Four bytes per value (f32), at most one byte of a frame per value, and small arrays such as
    // the layout.
    let needed = Bytes(5 * values as u64) + Bytes::kib(64) + Bytes(12 * patches.grid.patches() as u64);
    let (cpu, counter) = (Cpu::new(2), WorkCounter::default());
    let workspace = Workspace::over(memory.poisoned(&cpu, Class::StepWorkspace, needed));
    cut_on(&Scope::new(&cpu, &workspace, &counter), patches, config.merge_size, size)
        .expect("the picture is cut into patches")
}

fn cut_on(
    scope: &Scope<'_, Cpu>,
    patches: &ResizedImage,
    merge: u32,
    size: PatchSize,
) -> Result<Vec<f32>, KernelError> {
    let (grid, mut places) = (patches.grid, [vec![], vec![], vec![]]);
    for (top, left) in (0..grid.h).step_by(merge as usize).flat_map(|top| {
        let columns = (0..grid.w).step_by(merge as usize);
        columns.map(move |left| (top, left))
    }) {
        for (row, column) in (0..merge).flat_map(|down| (0..merge).map(move |across| (top + down, left + across))) {
            places.iter_mut().zip([0, row, column]).for_each(|(axis, number)| axis.push(number));
        }
    }
    let frames: Vec<&[u8]> = patches.frames.iter().map(RgbImage::data).collect();
    let pixels = Pixels {
        bytes: scope.upload_parts(&frames)?,
        layout: scope.upload([1, 4], &[0, grid.h, grid.w, frames.len() as u32])?,
        levels: scope.upload([1, 7], &patches.levels.numbers())?,
        places: scope.upload([3, grid.patches()], &places.concat())?,
    };
    let mut out = scope.empty([grid.patches(), size.values()])?;
    scope.patchify(&pixels, size, &mut out)?;
    scope.download(&out)
}

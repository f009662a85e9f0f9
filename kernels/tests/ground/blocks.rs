//! Blocks, rows and states that are copied to host memory and back.

use std::{sync::Arc, time::Duration};

use bursar_budgets::*;
use bursar_kernels::{
    ops::{
        copy_blocks::{BlockCopy, CopyLists, copy_blocks, copy_rows, copy_states},
        transfer::fill_elements,
    },
    *,
};

use super::{leased, poisoned};

/// Copies of `(block, slot)` pairs.
fn lists(to_host: &[(u32, u32)], to_device: &[(u32, u32)]) -> CopyLists {
    let [to_host, to_device] =
        [to_host, to_device].map(|pairs| pairs.iter().map(|&(block, slot)| BlockCopy { block, slot }).collect());
    CopyLists { to_host, to_device }
}

/// The layers of a small cache on a device, and host memory for some of its blocks.
pub struct Blocks {
    segments: Vec<Segment>,
    shape: KvShape,
    blocks: usize,
    host: HostMemory,
    slots: usize,
}

impl Blocks {
    pub fn new(device: &Arc<dyn Device>, shape: KvShape, blocks: usize, slots: usize) -> Self {
        let layer = || leased(device.clone(), shape.block_bytes() * blocks as u64);
        let host =
            device.clone().host_memory(shape.block_bytes() * (shape.layers * slots) as u64).expect("host memory");
        Blocks { segments: (0..shape.layers).map(|_| layer()).collect(), shape, blocks, host, slots }
    }

    fn words(&self, layer: usize) -> Tensor<'_> {
        let shape = [self.blocks, self.shape.block_bytes().as_usize() / 4];
        // SAFETY: the segment is backed for these blocks, and only the test's thread uses them.
        unsafe { Tensor::persistent(self.segments[layer].address(), shape, DType::U32) }
    }

    /// Writes `of(layer, block)` to each word of each block.
    pub fn fill<B: Backend>(&self, backend: &B, of: impl Fn(usize, usize) -> u32) {
        let words = self.shape.block_bytes().as_usize() / 4;
        for layer in 0..self.shape.layers {
            let content: Vec<u32> = (0..self.blocks).flat_map(|block| vec![of(layer, block); words]).collect();
            fill_elements(backend, &content, &mut self.words(layer)).expect("the content is uploaded");
        }
    }

    /// The word that fills a block, for each layer.
    pub fn read<B: Backend>(&self, backend: &B, block: usize) -> Vec<u32> {
        let (counter, workspace) = (WorkCounter::default(), poisoned(Bytes::kib(64)));
        let scope = Scope::new(backend, &workspace, &counter);
        let of_layer = |layer| {
            let all = scope.download::<u32>(&self.words(layer)).expect("the content is downloaded");
            let block = &all[block * all.len() / self.blocks..(block + 1) * all.len() / self.blocks];
            assert!(block.iter().all(|word| *word == block[0]), "all words of a block are equal");
            block[0]
        };
        (0..self.shape.layers).map(of_layer).collect()
    }

    /// Starts copies of `(block, slot)` pairs.
    pub fn copy<B: Backend>(
        &self,
        backend: &B,
        to_host: &[(u32, u32)],
        to_device: &[(u32, u32)],
    ) -> Box<dyn ops::copy_blocks::Copying> {
        // SAFETY: this many blocks are backed, and only the test's thread uses them.
        let layer = |segment: &Segment| unsafe { KvLayer::new(segment.address(), self.blocks, self.shape) };
        let layers: Vec<_> = self.segments.iter().map(layer).collect();
        // SAFETY: the memory has space for this many slots.
        let host =
            unsafe { HostStore::new(self.host.address(), self.shape.layers, self.slots, self.shape.block_bytes()) };
        copy_blocks(backend, &layers, &host, &lists(to_host, to_device)).expect("the copies begin")
    }
}

/// Copies blocks to the host, immediately overwrites them with later work, and copies them back to
/// other blocks.
pub fn copy_to_host_and_back<B: Backend>(backend: &B, device: &Arc<dyn Device>) {
    let shape = KvShape { layers: 3, kv_heads: 2, head_dim: 8, dtype: DType::F32 };
    let blocks = Blocks::new(device, shape, 9, 5);
    let content = |layer: usize, block: usize| (100 * layer + block + 1) as u32;
    blocks.fill(backend, content);
    backend.wait_for_all().expect("the device reports no error");
    let leaving = blocks.copy(backend, &[(1, 0), (2, 1), (5, 4), (7, 3)], &[]);
    // Later work waits for these copies.
    blocks.fill(backend, |_, _| 0);
    let took = leaving.wait().expect("the copies complete");
    assert!(took < Duration::from_secs(60), "{took:?}");
    backend.wait_for_all().expect("the device still works");
    let coming = blocks.copy(backend, &[(8, 0)], &[(6, 4), (1, 1), (2, 3)]);
    coming.wait().expect("the copies complete");
    let of = |block| (0..3).map(|layer| content(layer, block)).collect::<Vec<_>>();
    for (block, expected) in [(6, of(5)), (1, of(2)), (2, of(7)), (3, vec![0; 3]), (5, vec![0; 3])] {
        assert_eq!(blocks.read(backend, block), expected, "block {block}");
    }
    blocks.copy(backend, &[], &[(1, 0)]).wait().expect("the copies complete");
    assert_eq!(blocks.read(backend, 1), [0; 3], "the slot holds the content of the last copy");
}

/// Copies states to the host, overwrites them when the copies have ended, and copies them back to
/// other slots.
pub fn states_go_and_come_back<B: Backend>(backend: &B, device: &Arc<dyn Device>) {
    let shape = StateShape {
        layers: 3,
        channels: 2 * 8 + 2 * 4,
        conv_rows: 3,
        key_heads: 1,
        value_heads: 2,
        key_dim: 8,
        value_dim: 4,
        activation: backend.target().activation(),
        state_dtype: StateDtype::F32,
    };
    let (slots, of_host, bytes) = (5, 4, shape.slot_bytes());
    let segments: Vec<_> = (0..shape.layers).map(|_| leased(device.clone(), bytes * slots as u64)).collect();
    let words = |layer: usize| {
        let elements = [slots, bytes.as_usize() / 4];
        // SAFETY: the segment is backed for these slots, and only this thread uses them.
        unsafe { Tensor::persistent(segments[layer].address(), elements, DType::U32) }
    };
    // SAFETY: this many slots are backed, and only this thread uses them.
    let layer = |segment: &Segment| unsafe { StateLayer::new(segment.address(), slots, shape) };
    let layers: Vec<_> = segments.iter().map(layer).collect();
    let memory = device.clone().host_memory(bytes * (shape.layers * of_host) as u64).expect("host memory");
    // SAFETY: the memory has space for this many slots.
    let host = unsafe { HostStore::new(memory.address(), shape.layers, of_host, bytes) };
    let fill = |of: fn(usize, usize) -> u32| {
        for number in 0..shape.layers {
            let content: Vec<u32> = (0..slots).flat_map(|slot| vec![of(number, slot); bytes.as_usize() / 4]).collect();
            fill_elements(backend, &content, &mut words(number)).expect("the content is uploaded");
        }
        backend.wait_for_all().expect("the device reports no error");
    };
    fill(|layer, slot| (100 * layer + slot) as u32);
    copy_states(backend, &layers, &host, &lists(&[(4, 0), (1, 3)], &[]))
        .expect("the copies begin")
        .wait()
        .expect("the copies complete");
    fill(|_, _| 7777);
    copy_states(backend, &layers, &host, &lists(&[], &[(2, 0), (0, 3)]))
        .expect("the copies begin")
        .wait()
        .expect("the copies complete");
    let (counter, workspace) = (WorkCounter::default(), poisoned(Bytes::kib(64)));
    let scope = Scope::new(backend, &workspace, &counter);
    for number in 0..shape.layers {
        let all = scope.download::<u32>(&words(number)).expect("the content is downloaded");
        for (slot, content) in all.chunks(all.len() / slots).enumerate() {
            let expected = [Some(1), None, Some(4), None, None][slot].map_or(7777, |from| 100 * number as u32 + from);
            assert!(content.iter().all(|word| *word == expected), "slot {slot} of layer {number} has {}", content[0]);
        }
    }
}

/// Copies rows of picture embeddings to the host, immediately overwrites them with later work, and
/// copies them back to other rows. The call that copies them back also copies rows to the host.
/// Some of the rows that this call copies to the host are rows that it also overwrites.
pub fn rows_go_and_come_back<B: Backend>(backend: &B, device: &Arc<dyn Device>) {
    let (rows, width, slots) = (11, 5, 7);
    let row_bytes = DType::F32.bytes(width);
    let segment = leased(device.clone(), row_bytes * rows as u64);
    // SAFETY: the segment is backed for these rows, and only this thread uses them.
    let cache = || unsafe { Tensor::persistent(segment.address(), [rows, width], DType::F32) };
    let memory = device.clone().host_memory(row_bytes * slots as u64).expect("host memory");
    // SAFETY: the memory has space for this many slots.
    let host = unsafe { HostStore::new(memory.address(), 1, slots, row_bytes) };
    let fill = |of: fn(usize) -> f32| {
        let content: Vec<f32> = (0..rows).flat_map(|row| vec![of(row); width]).collect();
        fill_elements(backend, &content, &mut cache()).expect("the content is uploaded");
    };
    let copy = |to_host: &[(u32, u32)], to_device: &[(u32, u32)]| {
        copy_rows(backend, &cache(), &host, &lists(to_host, to_device)).expect("the copies begin")
    };
    fill(|row| row as f32 + 1.0);
    backend.wait_for_all().expect("the device reports no error");
    let leaving = copy(&[(3, 0), (4, 1), (9, 6)], &[]);
    fill(|row| -(row as f32));
    leaving.wait().expect("the copies complete");
    backend.wait_for_all().expect("the device still works");
    copy(&[(1, 4), (2, 5)], &[(1, 0), (2, 1), (10, 6), (0, 5)]).wait().expect("the copies complete");
    let (counter, workspace) = (WorkCounter::default(), poisoned(Bytes::kib(64)));
    let all = Scope::new(backend, &workspace, &counter).download::<f32>(&cache()).expect("the content is downloaded");
    let expected = [-2.0, 4.0, 5.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0, -9.0, 10.0];
    for (row, expected) in expected.into_iter().enumerate() {
        assert_eq!(all[row * width..][..width], [expected; 5], "row {row}");
    }
}

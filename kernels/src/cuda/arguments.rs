//! Arguments and extents of kernel launches.

use bursar_budgets::Address;

use super::contract::gate;
use crate::{Tensor, calls::GateActivation};

/// Grid, block and dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// Thread blocks in x, y and z.
    pub grid: [usize; 3],
    /// Threads per block in x and y.
    pub block: [usize; 2],
    /// Bytes of dynamic shared memory per block.
    pub shared: usize,
}

impl Extent {
    /// Returns an extent of `blocks` thread blocks in x, with `threads` threads per block.
    pub(super) fn line(blocks: usize, threads: usize) -> Self {
        Extent { grid: [blocks, 1, 1], block: [threads, 1], shared: 0 }
    }
}

/// Returns the address of an optional operand. The address is 0 without an operand, and kernels do
/// not read it.
pub(super) fn address_or_null(operand: &Option<Tensor<'_>>) -> Address {
    operand.as_ref().map_or(Address(0), Tensor::address)
}

/// A type that kernels take by value. The type must have the memory layout that
/// the device compiler expects.
pub(super) trait Argument: Copy {}
impl Argument for u32 {}
impl Argument for u64 {}
impl Argument for f32 {}
impl Argument for Address {}

/// Maximum number of 8-byte words that the arguments of a launch occupy. An argument occupies at
/// least one word, so this is also the maximum number of arguments.
const WORDS: usize = 64;

/// The arguments of a launch, in the order of the kernel's parameters.
pub(super) struct Arguments {
    words: [u64; WORDS],
    /// Index of the first word of each argument.
    places: [usize; WORDS],
    count: usize,
    used: usize,
}

impl Default for Arguments {
    fn default() -> Self {
        Arguments { words: [0; WORDS], places: [0; WORDS], count: 0, used: 0 }
    }
}

impl Arguments {
    pub(super) fn with<A: Argument>(mut self, argument: A) -> Self {
        let words = size_of::<A>().div_ceil(size_of::<u64>());
        assert!(
            align_of::<A>() <= align_of::<u64>() && self.used + words <= WORDS,
            "the arguments exceed the kernel's parameters"
        );
        // SAFETY: the assertion has checked that the argument fits after the words in use, and that
        // a word's alignment suffices for the argument.
        unsafe { self.words.as_mut_ptr().add(self.used).cast::<A>().write(argument) };
        self.places[self.count] = self.used;
        self.used += words;
        self.count += 1;
        self
    }

    /// Appends all arguments of another list.
    pub(super) fn followed_by(mut self, other: Arguments) -> Self {
        assert!(self.used + other.used <= WORDS, "the arguments exceed the kernel's parameters");
        self.words[self.used..][..other.used].copy_from_slice(&other.words[..other.used]);
        for (place, word) in self.places[self.count..].iter_mut().zip(&other.places[..other.count]) {
            *place = self.used + word;
        }
        self.used += other.used;
        self.count += other.count;
        self
    }

    /// Returns the address of each argument, in the form that the driver expects.
    pub(super) fn pointers(&mut self) -> [*mut std::ffi::c_void; WORDS] {
        let words = self.words.as_mut_ptr();
        // SAFETY: each entry of `places` is an index into `words`, so the pointers stay inside the
        // array.
        self.places.map(|place| unsafe { words.add(place).cast() })
    }
}

/// Builds a launch's [`Arguments`] from a list.
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => { $crate::cuda::arguments::Arguments::default()$(.with($argument))* };
}
pub(super) use arguments;

/// The value of the kernels' `activation` parameter (`contract::gate`).
pub(super) fn gate_number(activation: GateActivation) -> u32 {
    match activation {
        GateActivation::Silu => gate::SILU,
        GateActivation::GeluTanh => gate::GELU_TANH,
    }
}

/// Converts a count or a pitch to the type that kernels take. Panics if the number does not fit.
/// The op layer has already refused such shapes.
pub(super) fn count(number: usize) -> u32 {
    u32::try_from(number).expect("the op layer refuses shapes that do not fit in 32 bits")
}

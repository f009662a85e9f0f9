//! A segment that one lane uses as a stack of temporaries. A workspace never grows and
//! never calls the driver.

use std::{cell::Cell, marker::PhantomData, sync::Arc};

use crate::{Address, Bytes, Hint, Segment};

/// The alignment of temporaries, sufficient for cuBLASLt, 128-bit loads and candle's GPU code.
const ALIGNMENT: Bytes = Bytes(256);

/// The start address of a dry workspace: not null, aligned, and far from any real mapping.
const DRY_BASE: Address = Address(1 << 60);

/// A stack of temporaries. Model code opens frames and takes temporaries from them. Dropping a
/// frame frees its temporaries.
///
/// A workspace belongs to the thread of one lane, so it is `Send` but not `Sync`.
///
/// ```
/// use bursar_budgets::{Bytes, Workspace};
/// let workspace = Workspace::dry();
/// let block = workspace.frame();
/// let hidden = block.take(Bytes(1000))?;
/// {
///     let attention = block.frame();
///     attention.take(Bytes(5000))?;
/// }
/// assert_eq!(workspace.used(), Bytes(1024));
/// assert_eq!(workspace.high_water(), Bytes(1024 + 5120));
/// # let _ = hidden;
/// # Ok::<(), bursar_budgets::WorkspaceFull>(())
/// ```
///
/// ```compile_fail
/// fn shared<T: Sync>() {}
/// shared::<bursar_budgets::Workspace>();
/// ```
#[derive(Debug)]
pub struct Workspace {
    segment: Option<Arc<Segment>>,
    base: Address,
    capacity: Bytes,
    used: Cell<Bytes>,
    high_water: Cell<Bytes>,
    /// The number of open frames.
    depth: Cell<usize>,
}

#[derive(Debug)]
#[must_use = "dropping a frame frees its temporaries"]
pub struct Frame<'w> {
    workspace: &'w Workspace,
    depth: usize,
    /// Bytes in use when the frame was opened.
    start: Bytes,
}

/// One temporary, which cannot outlive its frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Temporary<'f> {
    /// The address, a multiple of 256 bytes from the start of the workspace.
    pub address: Address,
    /// The requested length, before rounding up to a multiple of 256 bytes.
    pub bytes: Bytes,
    frame: PhantomData<&'f ()>,
}

/// The error of a temporary that did not fit. After planning, only a bug in Bursar or an input
/// outside the envelope can cause this error. It is not a panic, so that a probe can report it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a temporary of {} does not fit the workspace: {} of its {} are in use",
    asked.exact(),
    used.exact(),
    capacity.exact()
)]
pub struct WorkspaceFull {
    /// Requested bytes, rounded up to a multiple of 256.
    pub asked: Bytes,
    pub used: Bytes,
    pub capacity: Bytes,
}

impl Hint for WorkspaceFull {
    type Text = String;

    fn hint(&self) -> String {
        let short = self.used.saturating_add(self.asked).saturating_sub(self.capacity);
        format!("plan a workspace that is {} larger, or lower the envelope", short.exact())
    }
}

impl Workspace {
    /// A workspace over all memory that the segment has backed now.
    pub fn over(segment: impl Into<Arc<Segment>>) -> Workspace {
        Workspace::of_rank(segment, 0)
    }

    /// A workspace over the memory that the segment has backed for this rank.
    pub fn of_rank(segment: impl Into<Arc<Segment>>, rank: usize) -> Workspace {
        let segment = segment.into();
        Workspace::new(segment.address_on(rank), segment.backed(), Some(segment))
    }

    /// A workspace for planning, without memory and without a limit. Its addresses
    /// must not be accessed.
    pub fn dry() -> Workspace {
        Workspace::new(DRY_BASE, Bytes::MAX, None)
    }

    fn new(base: Address, capacity: Bytes, segment: Option<Arc<Segment>>) -> Workspace {
        assert!(base.is_multiple_of(ALIGNMENT), "a workspace is aligned to {ALIGNMENT}");
        Workspace { segment, base, capacity, used: Cell::default(), high_water: Cell::default(), depth: Cell::new(0) }
    }

    /// Opens a frame on top of all open frames.
    pub fn frame(&self) -> Frame<'_> {
        self.depth.set(self.depth.get() + 1);
        Frame { workspace: self, depth: self.depth.get(), start: self.used.get() }
    }

    /// Whether this is a workspace for planning, without memory.
    pub fn is_dry(&self) -> bool {
        self.segment.is_none()
    }

    /// The segment under this workspace; `None` if the workspace is dry.
    pub fn segment(&self) -> Option<&Arc<Segment>> {
        self.segment.as_ref()
    }

    pub fn address(&self) -> Address {
        self.base
    }

    pub fn capacity(&self) -> Bytes {
        self.capacity
    }

    /// Bytes held by open frames.
    pub fn used(&self) -> Bytes {
        self.used.get()
    }

    /// The maximum number of bytes in use at once since the last reset. A temporary that did not
    /// fit does not count.
    pub fn high_water(&self) -> Bytes {
        self.high_water.get()
    }

    /// Resets the high-water mark to the bytes in use now.
    pub fn reset_high_water(&self) {
        self.high_water.set(self.used.get());
    }

    fn take(&self, bytes: Bytes) -> Result<Address, WorkspaceFull> {
        let (used, capacity) = (self.used.get(), self.capacity);
        let full = |asked| WorkspaceFull { asked, used, capacity };
        let asked = bytes.checked_round_up(ALIGNMENT).ok_or(full(bytes))?;
        let top = used.checked_add(asked).filter(|top| *top <= capacity).ok_or(full(asked))?;
        let address = self.base.offset(used);
        self.used.set(top);
        self.high_water.set(self.high_water.get().max(top));
        Ok(address)
    }
}

impl Frame<'_> {
    /// Takes a temporary of this many uninitialized bytes, at a multiple of 256 bytes from the
    /// start of the workspace.
    ///
    /// # Errors
    /// [`WorkspaceFull`]. The workspace is then unchanged.
    ///
    /// # Panics
    /// If another frame is open on top of this frame. This is a bug in Bursar, since memory would
    /// be freed in the wrong order.
    pub fn take(&self, bytes: Bytes) -> Result<Temporary<'_>, WorkspaceFull> {
        self.assert_on_top("take from it");
        let address = self.workspace.take(bytes)?;
        Ok(Temporary { address, bytes, frame: PhantomData })
    }

    /// Opens a frame on top of this one.
    ///
    /// # Panics
    /// If another frame is already open on top of this frame, which is a bug in Bursar.
    pub fn frame(&self) -> Frame<'_> {
        self.assert_on_top("open another on it");
        self.workspace.frame()
    }

    pub fn workspace(&self) -> &Workspace {
        self.workspace
    }

    /// Bytes held by this frame and all frames on top of it.
    pub fn used(&self) -> Bytes {
        self.workspace.used() - self.start
    }

    fn assert_on_top(&self, deed: &str) {
        let living = self.workspace.depth.get();
        assert_eq!(
            self.depth, living,
            "frame {} of {living} is not on top: drop the inner frames first to {deed}",
            self.depth
        );
    }
}

impl Drop for Frame<'_> {
    fn drop(&mut self) {
        // Skip the check while a thread unwinds: frames still drop in order, and a second panic
        // would abort the process.
        if !std::thread::panicking() {
            self.assert_on_top("drop it");
        }
        self.workspace.depth.set(self.depth - 1);
        self.workspace.used.set(self.start);
    }
}

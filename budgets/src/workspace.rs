//! A segment that one lane uses as a stack of temporaries. It never grows and never calls the driver.

use std::{cell::Cell, marker::PhantomData, sync::Arc};

use crate::{Address, Bytes, Hint, Segment};

/// Temporaries are rounded up to this: enough for cuBLASLt, 128-bit loads and candle's GPU code.
const ALIGNMENT: Bytes = Bytes(256);

/// Where a dry workspace claims to start: not null, aligned, and far from any real mapping.
const DRY_BASE: Address = Address(1 << 60);

/// A stack of temporaries. Model code opens frames and takes temporaries from them; dropping a frame frees them.
///
/// It belongs to one lane's thread: it is `Send`, but not `Sync`.
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
    /// How many frames are open.
    depth: Cell<usize>,
}

/// Temporaries that are freed together.
#[derive(Debug)]
#[must_use = "a frame gives back what it holds when it drops"]
pub struct Frame<'w> {
    workspace: &'w Workspace,
    depth: usize,
    /// Bytes in use when it opened.
    start: Bytes,
}

/// One temporary. It cannot outlive its frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Temporary<'f> {
    /// Its address, a multiple of 256 bytes from the workspace's start.
    pub address: Address,
    /// Its length, before rounding.
    pub bytes: Bytes,
    frame: PhantomData<&'f ()>,
}

/// A temporary did not fit. After planning, only our bug or an input outside the envelope can cause this. It is an
/// error, not a panic, so that a probe can report it as evidence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a temporary of {} does not fit the workspace: {} of its {} are in use",
    asked.exact(),
    used.exact(),
    capacity.exact()
)]
pub struct WorkspaceFull {
    /// Bytes wanted, rounded up to 256.
    pub asked: Bytes,
    /// Bytes in use.
    pub used: Bytes,
    /// Bytes in the workspace.
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
    /// A workspace over everything that the segment has backed now.
    pub fn over(segment: impl Into<Arc<Segment>>) -> Workspace {
        Workspace::of_rank(segment, 0)
    }

    /// A workspace over what the segment has backed for a rank.
    pub fn of_rank(segment: impl Into<Arc<Segment>>, rank: usize) -> Workspace {
        let segment = segment.into();
        Workspace::new(segment.address_on(rank), segment.backed(), Some(segment))
    }

    /// A workspace for planning, without memory and without a limit. Its addresses must not be used.
    pub fn dry() -> Workspace {
        Workspace::new(DRY_BASE, Bytes::MAX, None)
    }

    fn new(base: Address, capacity: Bytes, segment: Option<Arc<Segment>>) -> Workspace {
        assert!(base.is_multiple_of(ALIGNMENT), "a workspace starts on {ALIGNMENT}");
        Workspace { segment, base, capacity, used: Cell::default(), high_water: Cell::default(), depth: Cell::new(0) }
    }

    /// Opens a frame on top of all open ones.
    pub fn frame(&self) -> Frame<'_> {
        self.depth.set(self.depth.get() + 1);
        Frame { workspace: self, depth: self.depth.get(), start: self.used.get() }
    }

    /// Whether it has no memory, as for planning.
    pub fn is_dry(&self) -> bool {
        self.segment.is_none()
    }

    /// The segment that it uses; `None` if dry.
    pub fn segment(&self) -> Option<&Arc<Segment>> {
        self.segment.as_ref()
    }

    /// Where it starts.
    pub fn address(&self) -> Address {
        self.base
    }

    /// Bytes in the workspace.
    pub fn capacity(&self) -> Bytes {
        self.capacity
    }

    /// Bytes that open frames hold.
    pub fn used(&self) -> Bytes {
        self.used.get()
    }

    /// The most bytes in use at once since the last reset. A temporary that did not fit does not count.
    pub fn high_water(&self) -> Bytes {
        self.high_water.get()
    }

    /// Sets the high-water mark to what is in use now.
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
    /// Takes this many bytes, uninitialised, at a multiple of 256 bytes.
    ///
    /// # Errors
    /// [`WorkspaceFull`]. The workspace is then unchanged.
    ///
    /// # Panics
    /// If a frame on top of this one is open: our bug, since memory would be freed in the wrong order.
    pub fn take(&self, bytes: Bytes) -> Result<Temporary<'_>, WorkspaceFull> {
        self.assert_on_top("take from it");
        let address = self.workspace.take(bytes)?;
        Ok(Temporary { address, bytes, frame: PhantomData })
    }

    /// Opens a frame on top of this one.
    ///
    /// # Panics
    /// If another frame on top of this one is open: our bug.
    pub fn frame(&self) -> Frame<'_> {
        self.assert_on_top("open another on it");
        self.workspace.frame()
    }

    /// The workspace that this frame belongs to.
    pub fn workspace(&self) -> &Workspace {
        self.workspace
    }

    /// Bytes that this frame and those on top of it hold.
    pub fn used(&self) -> Bytes {
        self.workspace.used() - self.start
    }

    fn assert_on_top(&self, deed: &str) {
        let living = self.workspace.depth.get();
        assert_eq!(
            self.depth, living,
            "frame {} of {living} is not on top: drop the inner ones first to {deed}",
            self.depth
        );
    }
}

impl Drop for Frame<'_> {
    fn drop(&mut self) {
        // While a thread unwinds, frames still drop in order, but a second panic would abort the process.
        if !std::thread::panicking() {
            self.assert_on_top("drop it");
        }
        self.workspace.depth.set(self.depth - 1);
        self.workspace.used.set(self.start);
    }
}

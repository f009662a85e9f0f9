//! A segment used as a stack of temporaries by one lane; it never grows and never calls the driver.

use std::{cell::Cell, marker::PhantomData, sync::Arc};

use crate::{Address, Bytes, Hint, Segment};

/// What the size of a temporary is rounded up to; cuBLASLt and 128-bit loads want no less, and candle's GPU users 256.
const ALIGNMENT: Bytes = Bytes(256);

/// Where a dry workspace pretends to start: not null, aligned, and nowhere near a real mapping.
const DRY_BASE: Address = Address(1 << 60);

/// A stack of temporaries. The model code opens frames and takes from them; a frame gives back on drop.
///
/// It belongs to one lane's thread: it can be sent to it, but not shared.
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
    /// Frames that live.
    depth: Cell<usize>,
}

/// Temporaries that end together.
#[derive(Debug)]
#[must_use = "a frame gives back what it holds when it drops"]
pub struct Frame<'w> {
    workspace: &'w Workspace,
    depth: usize,
    /// What was used when it opened.
    start: Bytes,
}

/// A temporary: it cannot outlive its frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch<'f> {
    /// Where; a multiple of 256 bytes from the workspace's start.
    pub address: Address,
    /// How long, as asked for.
    pub bytes: Bytes,
    frame: PhantomData<&'f ()>,
}

/// A temporary did not fit. After planning this is our bug or an input from outside the envelope; it is an error so that
/// a probe can report it as evidence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a temporary of {} does not fit: {} of the workspace's {} are in use",
    asked.exact(),
    used.exact(),
    capacity.exact()
)]
pub struct WorkspaceFull {
    /// How much was wanted, rounded up to 256 bytes.
    pub asked: Bytes,
    /// How much was in use.
    pub used: Bytes,
    /// How much there is.
    pub capacity: Bytes,
}

impl Hint for WorkspaceFull {
    type Text = String;

    fn hint(&self) -> String {
        let short = self.used.saturating_add(self.asked).saturating_sub(self.capacity);
        format!("plan the workspace {} larger, or lower the envelope", short.exact())
    }
}

impl Workspace {
    /// A workspace on all that the segment has backed now.
    pub fn over(segment: impl Into<Arc<Segment>>) -> Workspace {
        let segment = segment.into();
        Workspace::new(segment.address(), segment.backed(), Some(segment))
    }

    /// A workspace without memory or end, for planning: it hands out addresses that must not be used.
    pub fn dry() -> Workspace {
        Workspace::new(DRY_BASE, Bytes::MAX, None)
    }

    fn new(base: Address, capacity: Bytes, segment: Option<Arc<Segment>>) -> Workspace {
        assert!(base.is_multiple_of(ALIGNMENT), "a workspace starts on {ALIGNMENT}");
        Workspace { segment, base, capacity, used: Cell::default(), high_water: Cell::default(), depth: Cell::new(0) }
    }

    /// Opens a frame on top of all that live.
    pub fn frame(&self) -> Frame<'_> {
        self.depth.set(self.depth.get() + 1);
        Frame { workspace: self, depth: self.depth.get(), start: self.used.get() }
    }

    /// Whether there is no memory behind it.
    pub fn is_dry(&self) -> bool {
        self.segment.is_none()
    }

    /// The segment behind it; none when dry.
    pub fn segment(&self) -> Option<&Arc<Segment>> {
        self.segment.as_ref()
    }

    /// Where it starts.
    pub fn address(&self) -> Address {
        self.base
    }

    /// How much there is.
    pub fn capacity(&self) -> Bytes {
        self.capacity
    }

    /// How much living frames hold.
    pub fn used(&self) -> Bytes {
        self.used.get()
    }

    /// The most that was used at once since the mark was last reset. A temporary that did not fit does not count.
    pub fn high_water(&self) -> Bytes {
        self.high_water.get()
    }

    /// Starts the high-water mark again from what is used now.
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
    /// A temporary of so many bytes, uninitialised, at a multiple of 256 bytes.
    ///
    /// # Errors
    /// [`WorkspaceFull`]; the workspace is then as before.
    ///
    /// # Panics
    /// When a frame on top of this one lives: what it took would be given back in the wrong order. Our bug.
    pub fn take(&self, bytes: Bytes) -> Result<Stretch<'_>, WorkspaceFull> {
        self.assert_on_top("take from it");
        let address = self.workspace.take(bytes)?;
        Ok(Stretch { address, bytes, frame: PhantomData })
    }

    /// Opens a frame on top of this one.
    ///
    /// # Panics
    /// When another frame on top of this one lives: our bug.
    pub fn frame(&self) -> Frame<'_> {
        self.assert_on_top("open another on it");
        self.workspace.frame()
    }

    /// The workspace that it is of.
    pub fn workspace(&self) -> &Workspace {
        self.workspace
    }

    /// How much it and the frames on top of it hold.
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
        // While a thread unwinds the frames still drop inner first, but asserting again would abort the process.
        if !std::thread::panicking() {
            self.assert_on_top("drop it");
        }
        self.workspace.depth.set(self.depth - 1);
        self.workspace.used.set(self.start);
    }
}

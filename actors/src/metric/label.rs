//! Labels: each a type, so that a metric cannot be recorded with others than its own. Their values are bounded.

use std::sync::Arc;

use bursar_budgets::{Class, Device, Label, Refusal};
use metrics::SharedString;

use crate::{finish_reason::FinishReason, phase::Phase, tree::Role};

/// All values that a label may have, known before any of them is recorded; empty for names of devices and models.
pub type Words = fn() -> Vec<&'static str>;

/// A value of one label.
pub trait LabelValue {
    /// The label's name.
    const NAME: &'static str;
    /// All values; empty where a runtime gives them.
    const WORDS: Words = Vec::new;
    /// The value; cheap.
    fn value(&self) -> SharedString;
}

/// The labels of one metric, in order.
pub trait LabelSet {
    /// Their names.
    const NAMES: &'static [&'static str];
    /// All values of each.
    const WORDS: &'static [Words];
    /// Names and values.
    fn labels(&self) -> Vec<metrics::Label>;
}

fn label<V: LabelValue>(value: &V) -> metrics::Label {
    metrics::Label::new(V::NAME, value.value())
}

impl LabelSet for () {
    const NAMES: &'static [&'static str] = &[];
    const WORDS: &'static [Words] = &[];

    fn labels(&self) -> Vec<metrics::Label> {
        Vec::new()
    }
}

impl<A: LabelValue> LabelSet for A {
    const NAMES: &'static [&'static str] = &[A::NAME];
    const WORDS: &'static [Words] = &[A::WORDS];

    fn labels(&self) -> Vec<metrics::Label> {
        vec![label(self)]
    }
}

impl<A: LabelValue, B: LabelValue> LabelSet for (A, B) {
    const NAMES: &'static [&'static str] = &[A::NAME, B::NAME];
    const WORDS: &'static [Words] = &[A::WORDS, B::WORDS];

    fn labels(&self) -> Vec<metrics::Label> {
        vec![label(&self.0), label(&self.1)]
    }
}

impl<A: LabelValue, B: LabelValue, C: LabelValue> LabelSet for (A, B, C) {
    const NAMES: &'static [&'static str] = &[A::NAME, B::NAME, C::NAME];
    const WORDS: &'static [Words] = &[A::WORDS, B::WORDS, C::WORDS];

    fn labels(&self) -> Vec<metrics::Label> {
        vec![label(&self.0), label(&self.1), label(&self.2)]
    }
}

/// A device, as it is chosen on the command line: `host`, `cuda:0`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLabel(Arc<str>);

impl DeviceLabel {
    /// Of this device.
    pub fn of(device: &dyn Device) -> Self {
        DeviceLabel(device.label().into())
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl LabelValue for DeviceLabel {
    const NAME: &'static str = "device";

    fn value(&self) -> SharedString {
        self.0.clone().into()
    }
}

/// A model, by the name that the runtime gave it.
impl LabelValue for Label {
    const NAME: &'static str = "model";

    fn value(&self) -> SharedString {
        Arc::<str>::from(self).into()
    }
}

/// A lease's class. All tenants share a value: they name themselves.
impl LabelValue for Class {
    const NAME: &'static str = "class";
    const WORDS: Words = || Class::KINDS.to_vec();

    fn value(&self) -> SharedString {
        self.kind().into()
    }
}

impl LabelValue for Phase {
    const NAME: &'static str = "phase";
    const WORDS: Words = || Phase::ALL.iter().map(|phase| phase.name()).collect();

    fn value(&self) -> SharedString {
        self.name().into()
    }
}

macro_rules! given {
    ($($(#[$doc:meta])* $name:ident = $label:literal;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub struct $name(pub &'static str);

            impl LabelValue for $name {
                const NAME: &'static str = $label;

                fn value(&self) -> SharedString {
                    self.0.into()
                }
            }
        )*
    };
}

given! {
    /// A version of this crate.
    Version = "version";
    /// How it was built: `debug` or `release`.
    Build = "build";
    /// What `config.json` calls a family, as the registry has it.
    Architecture = "architecture";
    /// The type that a model computes in.
    Dtype = "dtype";
}

macro_rules! words {
    ($label:literal: $(#[$doc:meta])* $name:ident { $($(#[$word_doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $name {
            $($(#[$word_doc])* $variant,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: [$name; [$($word),*].len()] = [$($name::$variant),*];

            /// The label's value.
            pub const fn name(self) -> &'static str {
                match self {
                    $($name::$variant => $word,)*
                }
            }
        }

        impl LabelValue for $name {
            const NAME: &'static str = $label;
            const WORDS: Words = || vec![$($word),*];

            fn value(&self) -> SharedString {
                self.name().into()
            }
        }
    };
}

/// Those of a model; runtime and budget have no model, and say themselves that they are there.
impl LabelValue for Role {
    const NAME: &'static str = "actor";
    const WORDS: Words = || Role::OF_A_MODEL.iter().map(|role| role.name()).collect();

    fn value(&self) -> SharedString {
        self.name().into()
    }
}

/// Why a lease was refused, without the numbers.
impl LabelValue for Refusal {
    const NAME: &'static str = "reason";
    const WORDS: Words = || Refusal::NAMES.to_vec();

    fn value(&self) -> SharedString {
        self.name().into()
    }
}

words! { "permit":
    /// What profiles allow so many of at once.
    Permit {
        /// Sequences in a step.
        Sequences = "sequences",
        /// Patches in a launch of pictures.
        Patches = "patches",
    }
}

words! { "reason":
    /// How an attempt at sizing ended.
    AttemptEnd {
        /// The model serves with what it found.
        Ready = "ready",
        /// The device, or the ledger, had not enough.
        Memory = "memory",
        /// Something else went wrong.
        Error = "error",
        /// Its actor died.
        Died = "died",
    }
}

words! { "reason":
    /// Why a sequence lost its blocks before its end.
    Preempted {
        /// There were none left for those before it.
        Blocks = "blocks",
        /// Keys and values became fewer.
        Shrink = "shrink",
    }
}

words! { "reason":
    /// How a request ended.
    RequestEnd {
        /// The model ended it, or a stop string came.
        Stop = "stop",
        /// It had as many tokens as it might.
        Length = "length",
        /// Its caller had gone.
        Cancelled = "cancelled",
        /// The chat itself was at fault: malformed, or outside the envelope.
        Refused = "refused",
        /// As many as may be were under way.
        Overloaded = "overloaded",
        /// Its deadline had passed.
        TooLate = "too_late",
        /// The model did not start, has stopped, or takes no more.
        Stopped = "stopped",
        /// The device was lost.
        DeviceLost = "device_lost",
        /// Too many actors died under it.
        GivenUp = "given_up",
        /// Anything else.
        Error = "error",
    }
}

impl From<FinishReason> for RequestEnd {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => RequestEnd::Stop,
            FinishReason::Length => RequestEnd::Length,
        }
    }
}

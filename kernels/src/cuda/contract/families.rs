//! The macro that defines the constants that host code and kernels share. The generated header
//! gives the same constants to the device code.

/// Bytes of an f32 sum.
pub(super) const SUM: usize = 4;

/// Defines one module per kernel family, with constants and with functions of one argument (a
/// size). In tests, the macro also lists all of them for the generated header: a constant becomes a
/// constant of the same name, and a function becomes a variable template with one value per size.
macro_rules! contract {
    ($($(#[doc = $about:literal])* mod $family:ident {
        $($(#[doc = $doc:literal])* const $name:ident: $type:ty = $value:expr;)*
        $(by $size:ident: $($(#[doc = $by_doc:literal])* fn $function:ident($argument:ident) -> usize { $($body:tt)* })*)?
    })*) => {
        $($(#[doc = $about])*
        #[allow(dead_code, reason = "some numbers only the device code needs")]
        pub(crate) mod $family {
            #[allow(unused_imports, reason = "not every family needs all of it")]
            use super::*;

            $($(#[doc = $doc])* pub(crate) const $name: $type = $value;)*
            $($($(#[doc = $by_doc])* pub(crate) const fn $function($argument: $size) -> usize { $($body)* })*)?
        })*

        /// All families of a file, in the order of the file.
        #[cfg(test)]
        pub(super) fn families() -> Vec<super::header::Family> {
            use super::header::{Family, Item};
            vec![$(Family {
                name: stringify!($family),
                about: [$($about),*].concat(),
                items: vec![
                    $(Item::constant(stringify!($name), [$($doc),*].concat(), $family::$name as u64),)*
                    $($(Item::of_sizes::<$size>(
                        stringify!($function), [$($by_doc),*].concat(), |size| $family::$function(size)),)*)?
                ],
            }),*]
        }
    };
}
pub(super) use contract;

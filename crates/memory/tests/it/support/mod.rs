//! Children, recorded pins, and memory whose pages are known.

pub(crate) mod child;
pub(crate) mod place;
pub(crate) mod recorder;

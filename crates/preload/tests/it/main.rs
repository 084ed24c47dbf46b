//! Tests of the preloaded library, in programs that it is loaded into.

mod messages;
mod preload;

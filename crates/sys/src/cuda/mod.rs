//! The few calls of a GPU's driver that moving memory takes, and how they fail.
//!
//! [`Driver`] is one device with one context. [`real::Cuda`] is the driver of the machine, loaded
//! when it is first asked for; nothing is linked, so that a program runs the same without it. Models
//! of a device implement the same trait.

#[cfg(feature = "cuda")]
mod real;

#[cfg(feature = "cuda")]
pub use real::{Cuda, Inventory, inventory};

use std::fmt;

/// An in-order queue of the device, as the driver names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stream(u64);

/// A mark in a stream, as the driver names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Event(u64);

macro_rules! names {
    ($($name:ident),+) => {$(
        impl $name {
            /// A name that a driver gave.
            ///
            /// # Safety
            /// It must be one of the driver that it is used with, and not destroyed.
            pub unsafe fn from_raw(name: u64) -> Self {
                Self(name)
            }

            /// What the driver calls it.
            pub fn raw(self) -> u64 {
                self.0
            }
        }
    )+};
}

names!(Stream, Event);

/// Which way a copy goes. The driver wants to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Way {
    /// From ordinary memory to the device.
    In,
    /// From the device to ordinary memory.
    Out,
    /// Inside the device.
    Within,
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its number among the devices of the process.
    pub ordinal: usize,
    /// What its maker calls it.
    pub name: String,
    /// The newest version of CUDA that the driver knows: 1000 times the major number plus 10 times
    /// the minor one.
    pub driver_version: u32,
    /// How many copies it carries out at the same time.
    pub copy_engines: usize,
    /// Whether memory that may not be written can be registered.
    pub registers_read_only: bool,
}

/// One device, with a context in this process. Calls may come from any thread, except where they
/// say otherwise.
///
/// # Safety
/// Memory is given back on a driver's word: `is_reached` must not be true of an event before
/// everything that was put into its stream before it is over, and copies must touch no memory but
/// what they were given.
pub unsafe trait Driver: Send + Sync + fmt::Debug {
    /// What the device is.
    fn facts(&self) -> &DeviceFacts;

    /// Makes the calling thread one that uses streams and events of this device.
    fn enter(&self) -> Result<(), DriverError>;

    /// How much memory of the device is free, and how much there is.
    fn memory(&self) -> Result<(usize, usize), DriverError>;

    /// Takes memory of the device.
    fn allocate(&self, bytes: usize) -> Result<u64, DriverError>;

    /// Gives memory of the device back.
    ///
    /// # Safety
    /// It must be from [`Driver::allocate`], and nothing may use it any more.
    unsafe fn free(&self, address: u64);

    /// Takes ordinary memory that is registered from the start.
    fn allocate_pinned(&self, bytes: usize) -> Result<u64, DriverError>;

    /// Gives such memory back.
    ///
    /// # Safety
    /// It must be from [`Driver::allocate_pinned`], and nothing may use it any more.
    unsafe fn free_pinned(&self, address: u64);

    /// Pins pages and makes them known to the device. Pages that are registered cannot be
    /// registered again.
    fn register(&self, address: usize, bytes: usize, read_only: bool) -> Result<(), DriverError>;

    /// Undoes [`Driver::register`], for the whole range that begins at `address`.
    ///
    /// # Safety
    /// No copy of this memory may be in a stream: the device would go on with pages that are given
    /// to others.
    unsafe fn unregister(&self, address: usize) -> Result<(), DriverError>;

    /// Whether an address is the device's: `None` if the driver does not know it.
    fn is_device(&self, address: u64) -> Option<bool>;

    /// Whether this device can copy what a caller says is memory of a device: `false` if the driver
    /// knows the address as another device's, or not at all.
    fn reaches(&self, address: u64) -> bool;

    /// A new stream. For threads that [entered](Driver::enter), like all calls below.
    fn create_stream(&self) -> Result<Stream, DriverError>;

    /// Ends a stream, after what is in it.
    fn destroy_stream(&self, stream: Stream);

    /// A new event.
    fn create_event(&self) -> Result<Event, DriverError>;

    /// Ends an event.
    fn destroy_event(&self, event: Event);

    /// Puts a copy into a stream.
    ///
    /// # Safety
    /// Both ranges must be valid until the stream has passed the copy, and nobody else may write to
    /// either, or read the target; ordinary memory must be registered, and lie inside one
    /// registration.
    unsafe fn copy(
        &self,
        way: Way,
        source: u64,
        target: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), DriverError>;

    /// Copies ordinary memory that is not registered, and returns when that is over.
    ///
    /// # Safety
    /// Both ranges must be valid, and nobody else may write to either, or read the target.
    unsafe fn copy_now(
        &self,
        way: Way,
        source: u64,
        target: u64,
        bytes: usize,
    ) -> Result<(), DriverError>;

    /// Puts setting every byte of device memory to a value into a stream.
    ///
    /// # Safety
    /// The range must be valid until the stream has passed this, and nobody else may access it.
    unsafe fn fill(
        &self,
        target: u64,
        value: u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), DriverError>;

    /// Puts an event into a stream.
    fn record(&self, event: Event, stream: Stream) -> Result<(), DriverError>;

    /// Lets a stream go on only when an event, recorded in another, is reached.
    fn await_event(&self, stream: Stream, event: Event) -> Result<(), DriverError>;

    /// Waits until everything in a stream is over, or the device is lost.
    fn drain(&self, stream: Stream);

    /// Whether the device has come to an event; `true` for one that was never recorded.
    fn is_reached(&self, event: Event) -> Result<bool, DriverError>;
}

/// What a driver said, and in answer to what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriverError {
    /// The call.
    pub call: &'static str,
    /// The driver's number.
    pub code: u32,
}

/// Numbers of the driver that mean something here.
pub mod code {
    /// An argument makes no sense; also memory that is not there.
    pub const INVALID_VALUE: u32 = 1;
    /// No memory.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// The driver is being unloaded: the process is ending.
    pub const DEINITIALIZED: u32 = 4;
    /// There is no device.
    pub const NO_DEVICE: u32 = 100;
    /// There is no device of this number.
    pub const INVALID_DEVICE: u32 = 101;
    /// The device knows the address as something else.
    pub const ALREADY_MAPPED: u32 = 208;
    /// The device has not come there yet.
    pub const NOT_READY: u32 = 600;
    /// The device found memory that is not there.
    pub const ILLEGAL_ADDRESS: u32 = 700;
    /// Some of the pages are registered already.
    pub const ALREADY_REGISTERED: u32 = 712;
    /// This machine cannot do it.
    pub const NOT_SUPPORTED: u32 = 801;
    /// The driver's library and its kernel module are of different versions.
    pub const DRIVER_MISMATCH: u32 = 803;
    /// Something went wrong that has no number.
    pub const UNKNOWN: u32 = 999;
}

impl DriverError {
    /// Whether the device, or the context of this process on it, is gone for good.
    pub fn is_loss(&self) -> bool {
        use code::{DEINITIALIZED, ILLEGAL_ADDRESS, UNKNOWN};
        // Uncorrectable memory, a hardware fault, a broken link between devices; and what a device
        // that found a bad access, a trap or a time limit says from then on.
        matches!(
            self.code,
            DEINITIALIZED | UNKNOWN | 201 | 214 | 219 | 220 | 702 | 709 | 710 | 713..=721
        ) || self.code == ILLEGAL_ADDRESS
    }

    /// What the number means, for people.
    pub fn meaning(&self) -> &'static str {
        match self.code {
            code::INVALID_VALUE => "an argument makes no sense, or the memory is not mapped",
            code::OUT_OF_MEMORY => "out of memory",
            3 | code::DEINITIALIZED => "the driver is not there any more: the process is ending",
            34 => "the library is a stub without a driver: run on the machine with the GPU",
            46 => "the device is in use by somebody who does not share it",
            code::NO_DEVICE => "there is no GPU, or none is visible (CUDA_VISIBLE_DEVICES)",
            code::INVALID_DEVICE => "there is no GPU of this number",
            201 | 709 => "the context of this process is gone",
            code::ALREADY_MAPPED => "the device still knows the address as that of other memory",
            214 => "memory of the device has an error that cannot be corrected",
            code::ILLEGAL_ADDRESS => "the device found memory that is not there",
            code::ALREADY_REGISTERED => "some of the memory is registered already",
            800 => "the operation is not permitted",
            code::NOT_SUPPORTED => "the operation is not supported on this machine",
            code::DRIVER_MISMATCH => {
                "the driver's library and its kernel module differ: restart the machine or reload \
                 the module"
            }
            702 | 710 | 713..=721 => "the device failed while it worked",
            _ => "the driver gave no reason that is known here",
        }
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with {}: {}", self.call, self.code, self.meaning())
    }
}

impl std::error::Error for DriverError {}

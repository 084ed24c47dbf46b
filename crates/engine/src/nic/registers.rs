//! The registers and descriptors of the 82574L and its relatives, as far as a card that talks to
//! itself needs them. From Intel's datasheet of that controller.

/// Device control.
pub const CTRL: usize = 0x0000;
/// Device status.
pub const STATUS: usize = 0x0008;
/// Interrupts to mask.
pub const IMC: usize = 0x00D8;
/// Interrupts that are pending; reading clears them.
pub const ICR: usize = 0x00C0;
/// Receive control.
pub const RCTL: usize = 0x0100;
/// Transmit control.
pub const TCTL: usize = 0x0400;
/// Gaps between frames.
pub const TIPG: usize = 0x0410;
/// Packet split: sizes of the buffers of a receive descriptor.
pub const PSRCTL: usize = 0x2170;
/// Receive ring: address (low half).
pub const RDBAL: usize = 0x2800;
/// Receive ring: address (high half).
pub const RDBAH: usize = 0x2804;
/// Receive ring: bytes.
pub const RDLEN: usize = 0x2808;
/// Receive ring: the next that the card uses, in units of 16 bytes.
pub const RDH: usize = 0x2810;
/// Receive ring: the first that the card may not use, in units of 16 bytes.
pub const RDT: usize = 0x2818;
/// Transmit ring: address (low half).
pub const TDBAL: usize = 0x3800;
/// Transmit ring: address (high half).
pub const TDBAH: usize = 0x3804;
/// Transmit ring: bytes.
pub const TDLEN: usize = 0x3808;
/// Transmit ring: the next that the card uses.
pub const TDH: usize = 0x3810;
/// Transmit ring: the first that the card may not use.
pub const TDT: usize = 0x3818;
/// Transmit descriptors: when they are fetched and written back.
pub const TXDCTL: usize = 0x3828;
/// Receive checksums.
pub const RXCSUM: usize = 0x5000;
/// Receive filters and the format of descriptors.
pub const RFCTL: usize = 0x5008;
/// The card's own address (low half).
pub const RAL: usize = 0x5400;
/// The card's own address (high half).
pub const RAH: usize = 0x5404;

/// `CTRL`: full duplex.
pub const CTRL_FULL_DUPLEX: u32 = 1 << 0;
/// `CTRL`: the card does not start anything new on the bus.
pub const CTRL_STOP_BUS: u32 = 1 << 2;
/// `CTRL`: the link is up.
pub const CTRL_LINK_UP: u32 = 1 << 6;
/// `CTRL`: 1000 Mb/s.
pub const CTRL_SPEED_1000: u32 = 2 << 8;
/// `CTRL`: speed and duplex are those said here.
pub const CTRL_FORCE: u32 = 1 << 11 | 1 << 12;
/// `CTRL`: begin anew. Clears itself.
pub const CTRL_RESET: u32 = 1 << 26;

/// `STATUS`: the card has things going on on the bus.
pub const STATUS_ON_BUS: u32 = 1 << 19;

/// `RCTL`: receive.
pub const RCTL_ENABLE: u32 = 1 << 1;
/// `RCTL`: frames for everybody, whomever they are for.
pub const RCTL_PROMISCUOUS: u32 = 1 << 3 | 1 << 4 | 1 << 15;
/// `RCTL`: frames of more than 1522 bytes.
pub const RCTL_LONG_FRAMES: u32 = 1 << 5;
/// `RCTL`: what is sent is received.
pub const RCTL_LOOPBACK: u32 = 1 << 6;
/// `RCTL`: descriptors with several buffers.
pub const RCTL_PACKET_SPLIT: u32 = 1 << 10;
/// `RCTL`: the checksum of a frame is not written to memory.
pub const RCTL_STRIP_CHECKSUM: u32 = 1 << 26;

/// `TCTL`: transmit.
pub const TCTL_ENABLE: u32 = 1 << 1;
/// `TCTL`: short frames are padded.
pub const TCTL_PAD: u32 = 1 << 3;
/// `TCTL`: what the datasheet asks for at full duplex.
pub const TCTL_COLLISIONS: u32 = 0x0F << 4 | 0x3F << 12;

/// `TIPG`: what the datasheet asks for.
pub const TIPG_USUAL: u32 = 8 | 8 << 10 | 6 << 20;

/// `TXDCTL`: thresholds count descriptors, which the datasheet asks for.
pub const TXDCTL_COUNT_DESCRIPTORS: u32 = 1 << 22;

/// `RFCTL`: descriptors in the extended format, of which those with several buffers are.
pub const RFCTL_EXTENDED: u32 = 1 << 15;

/// What a card whose bus does not answer reads as.
pub const GONE: u32 = u32::MAX;

/// A transmit descriptor.
pub mod transmit {
    /// Bytes of one.
    pub const BYTES: usize = 16;
    /// The frame ends here.
    pub const END: u64 = 1 << 24;
    /// The card adds the checksum of the frame.
    pub const CHECKSUM: u64 = 1 << 25;

    /// The two words of one.
    pub fn words(address: u64, bytes: u16, flags: u64) -> [u64; 2] {
        [address, u64::from(bytes) | flags]
    }
}

/// A receive descriptor with several buffers. It holds their addresses until a frame has come, and
/// then what is known of that.
pub mod receive {
    /// Bytes of one.
    pub const BYTES: usize = 32;
    /// Where the status is written: over the lower half of the second address, so that an even
    /// address does not look as if a frame had come.
    pub const STATUS_AT: usize = 8;
    /// The status: a frame has come.
    pub const DONE: u32 = 1 << 0;
    /// The status: it ends here.
    pub const END: u32 = 1 << 1;
    /// The status: what was wrong with it.
    pub const ERRORS: u32 = 0x9F << 24;
    /// Where the length of the part in the first buffer is, in bits 32 to 47 of the word.
    pub const FIRST_LENGTH_AT: usize = 8;
    /// Where the lengths of the parts in the other buffers are, from bit 16 on.
    pub const OTHER_LENGTHS_AT: usize = 16;
}

//! Predefined handles of the MPI families: datatypes, operations, communicators, and constants.

use std::ffi::{CString, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use crate::library::{Family, Handle, Library};

/// What reductions make of the elements of a datatype.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Signed,
    Unsigned,
    Real,
    /// Two reals, which a sum adds one by one.
    Complex,
    /// Only for operations on bits.
    Byte,
    /// Only for logical operations.
    Bool,
    /// Moved, but not reduced.
    Opaque,
}

/// A predefined datatype whose elements are contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Datatype {
    pub(crate) class: Class,
    /// Bytes of one element.
    pub(crate) size: usize,
}

/// A predefined operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Max,
    Min,
    Sum,
    Product,
    LogicalAnd,
    BitAnd,
    LogicalOr,
    BitOr,
    LogicalXor,
    BitXor,
}

/// What this library needs to know of an MPI library.
#[derive(Debug)]
pub(crate) struct Handles {
    pub(crate) comm_null: Handle,
    pub(crate) datatype_null: Handle,
    pub(crate) byte: Handle,
    pub(crate) int: Handle,
    pub(crate) min: Handle,
    pub(crate) in_place: *const c_void,
    pub(crate) status_ignore: *mut c_void,
    pub(crate) error_other: c_int,
    pub(crate) error_count: c_int,
    datatypes: HandleMap<Datatype>,
    operations: HandleMap<Operation>,
}

// SAFETY: the pointers are constants that are compared and passed on, and never dereferenced.
unsafe impl Send for Handles {}
// SAFETY: as above.
unsafe impl Sync for Handles {}

impl Handles {
    /// The handles of the library. MPI must be initialized. `None` if they are unknown.
    #[inline]
    pub(crate) fn get(library: &Library) -> Option<&'static Self> {
        static HANDLES: OnceLock<Option<Handles>> = OnceLock::new();
        HANDLES.get_or_init(|| Self::find(library)).as_ref()
    }

    /// The predefined datatype of a handle whose elements are contiguous.
    #[inline]
    pub(crate) fn datatype(&self, handle: Handle) -> Option<Datatype> {
        self.datatypes.get(handle)
    }

    /// The predefined operation of a handle.
    #[inline]
    pub(crate) fn operation(&self, handle: Handle) -> Option<Operation> {
        self.operations.get(handle)
    }

    fn find(library: &Library) -> Option<Self> {
        let family = library.family?;
        let variable = |name: &str| {
            let name = CString::new(format!("ompi_mpi_{name}")).ok()?;
            library.symbols.find(&name).map(|address| address as Handle)
        };
        let handle = |row: &PredefinedRow| match family {
            Family::OpenMpi => variable(row.open_mpi),
            Family::Mpich => (row.mpich != 0).then_some(row.mpich as Handle),
            Family::StandardAbi => (row.standard != 0).then_some(row.standard as Handle),
        };
        let mut datatypes = HandleMap::new();
        for (class, row) in DATATYPES {
            let Some(handle) = handle(row) else { continue };
            let mut size: c_int = 0;
            // SAFETY: MPI is initialized, and the handle is a predefined datatype.
            let code = unsafe { (library.functions.type_size)(handle, &mut size) };
            // A datatype that the library was built without has no size.
            if let (0, 1..) = (code, size) {
                datatypes.insert(handle, Datatype { class: *class, size: size as usize });
            }
        }
        let mut operations = HandleMap::new();
        for (operation, row) in OPERATIONS {
            if let Some(handle) = handle(row) {
                operations.insert(handle, *operation);
            }
        }
        let of = |row: PredefinedRow| handle(&row);
        Some(Self {
            comm_null: of(row("comm_null", 0x0400_0000, 0x100))?,
            datatype_null: of(row("datatype_null", 0x0c00_0000, 0x200))?,
            byte: of(row("byte", 0x4c00_010d, 0x247))?,
            int: of(row("int", 0x4c00_0405, 0x209))?,
            min: of(row("op_min", 0x5800_0002, 0x22))?,
            in_place: match family {
                Family::Mpich => ptr::without_provenance(usize::MAX),
                _ => ptr::without_provenance(1),
            },
            status_ignore: match family {
                Family::Mpich => ptr::without_provenance_mut(1),
                _ => ptr::null_mut(),
            },
            error_other: if family == Family::Mpich { 15 } else { 16 },
            error_count: 2,
            datatypes,
            operations,
        })
    }
}

/// A predefined handle: the name of Open MPI's variable after `ompi_mpi_`, and the numbers of MPICH and
/// of the standard ABI; 0 where there is none.
#[derive(Debug, Clone, Copy)]
struct PredefinedRow {
    open_mpi: &'static str,
    mpich: u32,
    standard: u32,
}

const fn row(open_mpi: &'static str, mpich: u32, standard: u32) -> PredefinedRow {
    PredefinedRow { open_mpi, mpich, standard }
}

/// Operations. What is not listed (MPI_MAXLOC, MPI_MINLOC, operations of the program) is passed on.
const OPERATIONS: &[(Operation, PredefinedRow)] = &[
    (Operation::Max, row("op_max", 0x5800_0001, 0x23)),
    (Operation::Min, row("op_min", 0x5800_0002, 0x22)),
    (Operation::Sum, row("op_sum", 0x5800_0003, 0x21)),
    (Operation::Product, row("op_prod", 0x5800_0004, 0x24)),
    (Operation::LogicalAnd, row("op_land", 0x5800_0005, 0x30)),
    (Operation::BitAnd, row("op_band", 0x5800_0006, 0x28)),
    (Operation::LogicalOr, row("op_lor", 0x5800_0007, 0x31)),
    (Operation::BitOr, row("op_bor", 0x5800_0008, 0x29)),
    (Operation::LogicalXor, row("op_lxor", 0x5800_0009, 0x32)),
    (Operation::BitXor, row("op_bxor", 0x5800_000a, 0x2a)),
];

/// Contiguous datatypes. What is not listed (pairs of different types, derived datatypes) is packed.
const DATATYPES: &[(Class, PredefinedRow)] = &[
    (Class::Opaque, row("char", 0x4c00_0101, 0x243)),
    (Class::Signed, row("signed_char", 0x4c00_0118, 0x244)),
    (Class::Unsigned, row("unsigned_char", 0x4c00_0102, 0x245)),
    (Class::Byte, row("byte", 0x4c00_010d, 0x247)),
    (Class::Opaque, row("packed", 0x4c00_010f, 0x207)),
    (Class::Opaque, row("wchar", 0x4c00_040e, 0x23c)),
    (Class::Signed, row("short", 0x4c00_0203, 0x208)),
    (Class::Unsigned, row("unsigned_short", 0x4c00_0204, 0x20c)),
    (Class::Signed, row("int", 0x4c00_0405, 0x209)),
    (Class::Unsigned, row("unsigned", 0x4c00_0406, 0x20d)),
    (Class::Signed, row("long", 0x4c00_0807, 0x20a)),
    (Class::Unsigned, row("unsigned_long", 0x4c00_0808, 0x20e)),
    (Class::Signed, row("long_long_int", 0x4c00_0809, 0x20b)),
    (Class::Unsigned, row("unsigned_long_long", 0x4c00_0819, 0x20f)),
    (Class::Real, row("float", 0x4c00_040a, 0x210)),
    (Class::Real, row("double", 0x4c00_080b, 0x214)),
    (Class::Opaque, row("long_double", 0x4c00_100c, 0x220)),
    (Class::Signed, row("int8_t", 0x4c00_0137, 0x240)),
    (Class::Unsigned, row("uint8_t", 0x4c00_013b, 0x241)),
    (Class::Signed, row("int16_t", 0x4c00_0238, 0x248)),
    (Class::Unsigned, row("uint16_t", 0x4c00_023c, 0x249)),
    (Class::Signed, row("int32_t", 0x4c00_0439, 0x250)),
    (Class::Unsigned, row("uint32_t", 0x4c00_043d, 0x251)),
    (Class::Signed, row("int64_t", 0x4c00_083a, 0x258)),
    (Class::Unsigned, row("uint64_t", 0x4c00_083e, 0x259)),
    (Class::Bool, row("c_bool", 0x4c00_013f, 0x238)),
    (Class::Bool, row("cxx_bool", 0x4c00_0133, 0x239)),
    (Class::Complex, row("c_float_complex", 0x4c00_0840, 0x212)),
    (Class::Complex, row("c_double_complex", 0x4c00_1041, 0x216)),
    (Class::Complex, row("cxx_cplex", 0x4c00_0834, 0x213)),
    (Class::Complex, row("cxx_dblcplex", 0x4c00_1035, 0x217)),
    (Class::Signed, row("aint", 0x4c00_0843, 0x201)),
    (Class::Signed, row("offset", 0x4c00_0844, 0x203)),
    (Class::Signed, row("count", 0x4c00_0845, 0x202)),
    (Class::Opaque, row("2int", 0x4c00_0816, 0x22b)),
    (Class::Opaque, row("character", 0x4c00_011a, 0x21e)),
    (Class::Opaque, row("logical", 0x4c00_041d, 0x218)),
    (Class::Signed, row("integer", 0x4c00_041b, 0x219)),
    (Class::Signed, row("integer1", 0x4c00_012d, 0x2c1)),
    (Class::Signed, row("integer2", 0x4c00_022f, 0x2c9)),
    (Class::Signed, row("integer4", 0x4c00_0430, 0x2d1)),
    (Class::Signed, row("integer8", 0x4c00_0831, 0x2d9)),
    (Class::Real, row("real", 0x4c00_041c, 0x21a)),
    (Class::Real, row("real4", 0x4c00_0427, 0x2d2)),
    (Class::Real, row("real8", 0x4c00_0829, 0x2da)),
    (Class::Real, row("dblprec", 0x4c00_081f, 0x21c)),
    (Class::Complex, row("cplex", 0x4c00_081e, 0x21b)),
    (Class::Complex, row("dblcplex", 0x4c00_1022, 0x21d)),
    (Class::Complex, row("complex8", 0x4c00_0828, 0x2db)),
    (Class::Complex, row("complex16", 0x4c00_102a, 0x2e3)),
    (Class::Opaque, row("2integer", 0x4c00_0820, 0x232)),
    (Class::Opaque, row("2real", 0x4c00_0821, 0x230)),
    (Class::Opaque, row("2dblprec", 0x4c00_1023, 0x231)),
];

/// Places of a map; more than twice the number of datatypes.
const PLACES: usize = 256;

/// Map from predefined handles to values, with few steps for a lookup.
#[derive(Debug)]
struct HandleMap<T> {
    places: Box<[Option<(Handle, T)>; PLACES]>,
}

impl<T: Copy> HandleMap<T> {
    fn new() -> Self {
        Self { places: Box::new([const { None }; PLACES]) }
    }

    #[inline]
    fn first_place(handle: Handle) -> usize {
        // Fibonacci hashing: the upper bits depend on all bits of the handle.
        ((handle as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as usize
    }

    #[inline]
    fn get(&self, handle: Handle) -> Option<T> {
        let mut place = Self::first_place(handle);
        // The map is never full, so that a free place ends the search.
        while let Some((known, value)) = self.places[place % PLACES] {
            if known == handle {
                return Some(value);
            }
            place += 1;
        }
        None
    }

    fn insert(&mut self, handle: Handle, value: T) {
        let mut place = Self::first_place(handle);
        while self.places[place % PLACES].is_some_and(|(known, _)| known != handle) {
            place += 1;
        }
        self.places[place % PLACES] = Some((handle, value));
    }
}

/// The name of an environment variable that turns this library off.
pub(crate) const SWITCH: &str = "MEMFERRY_COLLECTIVES";

/// Whether the user has turned this library off.
pub(crate) fn is_switched_off() -> bool {
    static IS_OFF: OnceLock<bool> = OnceLock::new();
    *IS_OFF.get_or_init(|| memferry_sys::settings::is_switched_off(SWITCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_handle_is_listed_once_per_family() {
        let rows =
            || DATATYPES.iter().map(|(_, row)| row).chain(OPERATIONS.iter().map(|(_, row)| row));
        for (index, one) in rows().enumerate() {
            for other in rows().skip(index + 1) {
                assert_ne!(one.open_mpi, other.open_mpi);
                assert_ne!(one.mpich, other.mpich, "{} {}", one.open_mpi, other.open_mpi);
                assert_ne!(one.standard, other.standard, "{} {}", one.open_mpi, other.open_mpi);
            }
        }
        assert!(2 * DATATYPES.len() < PLACES);
    }

    #[test]
    fn what_is_inserted_is_found_and_nothing_else() {
        let mut map = HandleMap::new();
        for (number, (_, row)) in DATATYPES.iter().enumerate() {
            map.insert(row.mpich as Handle, number);
        }
        for (number, (_, row)) in DATATYPES.iter().enumerate() {
            assert_eq!(map.get(row.mpich as Handle), Some(number));
        }
        assert_eq!(map.get(0x4c00_dead), None);
        map.insert(0x4c00_0101, 77);
        assert_eq!(map.get(0x4c00_0101), Some(77));
    }
}

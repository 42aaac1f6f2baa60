// A table that is sorted by the heads of its columns.

import type { ComponentChildren } from "preact";

export interface Column<Row> {
  key: string;
  label: string;
  cell: (row: Row) => ComponentChildren;
  /** What it is sorted by; absent: it cannot be sorted by this column. */
  by?: (row: Row) => string | number | null | undefined;
  numeric?: boolean;
  /** Left out where the page is narrow. */
  minor?: boolean;
}

interface TableProps<Row> {
  label: string;
  columns: Column<Row>[];
  rows: Row[];
  id: (row: Row) => string;
  /** A column's key, with - before it: from the largest down. */
  sort: string;
  onSort: (sort: string) => void;
  rowClass?: (row: Row) => string;
  /** Whether the rows come in their order already. */
  sorted?: boolean;
}

export function Table<Row>({ label, columns, rows, id, sort, onSort, rowClass, sorted }: TableProps<Row>) {
  const descending = sort.startsWith("-");
  const key = sort.replace(/^-/, "");
  const shown = sorted ? rows : sortRows(rows, columns, sort);
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={label}>
      <table>
        <thead>
          <tr>
            {columns.map((column) => {
              const isChosen = column.by && column.key === key;
              const next = isChosen ? (descending ? column.key : `-${column.key}`) : column.numeric ? `-${column.key}` : column.key;
              return (
                <th
                  key={column.key}
                  scope="col"
                  class={classes(column)}
                  aria-sort={isChosen ? (descending ? "descending" : "ascending") : undefined}
                >
                  {column.by ? (
                    <button type="button" class="sort" onClick={() => onSort(next)}>
                      {column.label}
                      <span aria-hidden="true">{isChosen ? (descending ? "\u00a0↓" : "\u00a0↑") : ""}</span>
                    </button>
                  ) : (
                    column.label
                  )}
                </th>
              );
            })}
          </tr>
        </thead>
        <tbody>
          {shown.map((row) => (
            <tr key={id(row)} class={rowClass?.(row)}>
              {columns.map((column) => (
                <td key={column.key} class={classes(column)}>
                  {column.cell(row)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function classes<Row>({ numeric, minor }: Column<Row>): string {
  return [numeric && "numeric", minor && "minor"].filter(Boolean).join(" ");
}

export function sortRows<Row>(rows: Row[], columns: Column<Row>[], sort: string): Row[] {
  const column = columns.find((each) => each.key === sort.replace(/^-/, ""));
  if (!column?.by) return rows;
  const by = column.by;
  const sign = sort.startsWith("-") ? -1 : 1;
  return rows
    .map((row) => ({ row, value: by(row) }))
    .sort((a, b) => {
      // What has no value comes last, whichever way.
      const [isFirstEmpty, isSecondEmpty] = [a.value ?? null, b.value ?? null].map((value) => value === null);
      if (isFirstEmpty || isSecondEmpty) return Number(isFirstEmpty) - Number(isSecondEmpty);
      if (typeof a.value === "number" && typeof b.value === "number") return sign * (a.value - b.value);
      return sign * String(a.value).localeCompare(String(b.value), "en", { numeric: true });
    })
    .map(({ row }) => row);
}
